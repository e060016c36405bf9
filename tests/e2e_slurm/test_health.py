"""A node that is sick when the job starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster import Bed
from tests.e2e.conftest import Run
from tests.e2e_slurm.conftest import GPT, submit
from tests.e2e_slurm.test_training import assert_not_drained
from tpwrap.core import events

CHECK = """#!/bin/sh
[ "$SLURMD_NODENAME" = n2 ] || exit 0
echo "fan 3 stands still"
exit 1
"""


@pytest.mark.timeout(300)
def test_a_sick_node_is_drained_and_holds_no_rank(bed: Bed, undisturbed: Callable[..., Run]) -> None:
    hooks = "/etc/torchpass/health.d"
    install = f"mkdir -p {hooks} && cat > {hooks}/fans && chmod 755 {hooks}/fans"
    bed.run(["sh", "-c", install], user="root", input=CHECK)
    job = submit(bed)
    job.wait_step(5)
    assert bed.node("n2")["Reason"].startswith("torchpass: fans: fan 3 stands still")
    assert "DRAIN" in bed.node("n2")["State"]
    arranged = job.events(events.Arranged)[0]
    assert 1 in arranged.spares
    assert "fan 3 stands still" in arranged.reason
    job.end()
    job.assert_equal(undisturbed("gpt-slurm", GPT), set())
    assert_not_drained(bed, "n1", "n3", "n4")

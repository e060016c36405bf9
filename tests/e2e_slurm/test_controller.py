"""slurmctld away: drains and comments wait for it, training does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster import Bed
from tests.e2e.conftest import Run
from tests.e2e_slurm.conftest import GPT, submit
from tests.e2e_slurm.test_training import assert_drained
from tpwrap.core import events


@pytest.mark.timeout(300)
def test_a_node_dies_while_slurmctld_is_away(bed: Bed, undisturbed: Callable[..., Run]) -> None:
    job = submit(bed)
    job.wait_step(20)
    victim = job.node_of(2)
    bed.wait(lambda: (bed.dir / "state" / "job_state").exists(), "slurmctld has saved the job", 30)
    bed.kill_slurmctld()
    bed.kill(victim)
    bed.wait(lambda: job.events(events.FailoverFinished), "training goes on", 30)
    bed.wait(lambda: job.events(events.JobEnded), "training ends", 60)
    bed.start_slurmctld()
    assert_drained(bed, victim, job.id)
    shown = job.end()
    job.assert_equal(undisturbed("gpt-slurm", GPT), {2, 3})
    assert "failovers=1 finished" in shown["Comment"]

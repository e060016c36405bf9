"""The main job on the other versions of Slurm."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import Run
from tests.e2e_slurm.conftest import GPT, cluster, submit
from tests.e2e_slurm.test_training import assert_drained, assert_not_drained, assert_stays_out

pytestmark = [pytest.mark.slurm_matrix, pytest.mark.timeout(300)]
VERSIONS = ["24.11", "26.05"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_node_dies(version: str, undisturbed: Callable[..., Run]) -> None:
    with cluster(version=version) as bed:
        job = submit(bed)
        job.wait_step(20)
        victim = job.node_of(2)
        bed.kill(victim)
        assert_drained(bed, victim, job.id)
        shown = job.end()
        assert_stays_out(bed, victim)
        job.assert_equal(undisturbed("gpt-slurm", GPT), {2, 3})
        assert "spares=1/2 failovers=1 finished" in shown["Comment"]
        assert_not_drained(bed, *(node for node in bed.nodes if node != victim))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_batch_host_dies(version: str, undisturbed: Callable[..., Run]) -> None:
    with cluster(version=version) as bed:
        job = submit(bed, tpwrap_options="--coordinator n2")
        job.wait_step(20)
        bed.kill("n1")
        job.end("CANCELLED")
        job.assert_equal(undisturbed("gpt-slurm", GPT), set())

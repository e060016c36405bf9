"""What stays in Slurm's database after the job."""

from __future__ import annotations

import pytest

from tests.e2e_slurm.conftest import cluster, submit


@pytest.mark.timeout(300)
def test_the_story_is_kept() -> None:
    with cluster("AccountingStoreFlags=job_comment", dbd=True) as bed:
        job = submit(bed)
        job.wait_step(20)
        victim = job.node_of(2)
        bed.kill(victim)
        job.end()

        def kept() -> str:
            argv = ["sacct", "-n", "-P", "-X", "-j", str(job.id), "--duplicates", "-o", "comment"]
            return bed.run(argv).stdout

        bed.wait(lambda: "failovers=1 finished" in kept(), "sacct shows the comment", 20)
        assert f"{victim}->" in kept()

        def happened() -> str:
            return bed.run(["sacctmgr", "-n", "-P", "show", "event", f"nodes={victim}", "format=state,reason"]).stdout

        bed.wait(lambda: f"torchpass job {job.id}: " in happened(), "sacctmgr shows the drain", 20)

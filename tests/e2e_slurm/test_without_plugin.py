"""On a cluster where nothing of TorchPass is installed."""

from __future__ import annotations

from collections.abc import Callable

from tests.cluster.fixtures import open_bed
from tests.e2e.conftest import Run
from tests.e2e_slurm.conftest import GPT, submit
from tpwrap.core import events

BATCH = """#!/bin/bash
#SBATCH -N {nodes} --ntasks-per-node={tasks} --gres=gpu:{tasks} --no-kill
TORCHPASS_SPARES={spares} srun --no-kill {bin}/tpwrap {tpwrap_options} {bin}/python {script} --out {results}
"""


def test_a_node_dies(undisturbed: Callable[..., Run]) -> None:
    with open_bed(nodes=4, slurm_conf=["SlurmdTimeout=15"]) as bed:
        job = submit(bed, nodes=4, spares=2, batch=BATCH)
        job.wait_step(20)
        bed.kill(job.node_of(2))
        job.end()
        job.assert_equal(undisturbed("gpt-slurm", GPT), {2, 3})
        assert "the TorchPass plugin is not active in this srun" in job.output
        assert "no node helper here" in job.output
        assert job.events(events.JobEnded)[0].failovers == 1

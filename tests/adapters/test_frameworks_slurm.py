"""Trainer libraries with unchanged user code on real Slurm daemons: a node is powered off in the middle of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.conftest import EXAMPLE, RANKS, Example, difference, left
from tests.cluster import Bed
from tests.e2e.conftest import wait_for
from tests.e2e_slurm.conftest import bed, submit

__all__ = ["bed"]
pytestmark = pytest.mark.timeout(600)

BATCH = """#!/bin/bash
#SBATCH -N {nodes} --ntasks-per-node={tasks} --gres=gpu:{tasks} --torchpass-spares={spares} {options}
export OMP_NUM_THREADS=1
srun {bin}/tpwrap {tpwrap_options} {bin}/python {script}
"""

LONGER = {
    "trainer": ("--epochs", "6"),
    "accelerate": ("--epochs", "12"),
    "lightning": ("--epochs", "12"),
    "titan": ("--training.steps", "40"),
}
"""so that the node dies before the end"""
BEGUN = {
    "trainer": "checkpoint-5/trainer_state.json",
    "accelerate": "checkpoints/checkpoint_0/random_states_0.pkl",
    "lightning": "best-step=*.ckpt",
    "titan": "checkpoint/step-5/.metadata",
}
"""a file that comes early in the run"""


@pytest.mark.parametrize("name", list(EXAMPLE))
def test_a_node_dies(name: str, bed: Bed, oracle: Callable[[Example], Path]) -> None:
    short = EXAMPLE[name]
    pytest.importorskip(short.needs, reason=f"{short.needs} is not installed (examples/frameworks/README.md)")
    example = replace(short, name=f"{name}-longer", arguments=(*short.arguments, *LONGER[name]))
    expected = left(oracle(example))
    results = bed.share / "results"
    script = [str(results / "out") if word == "out" else word for word in example.command[1:]]
    environment = {"TORCHPASS_FAILURE_TIMEOUT": "10"}
    job = submit(bed, nodes=RANKS, tasks=1, spares=1, script=script, batch=BATCH, env=environment)
    wait_for(lambda: next((results / "out").glob(BEGUN[name]), None), 150)
    victim = job.node_of(1)
    bed.kill(victim)
    shown = job.end(seconds=200)
    assert "failovers=1 finished" in shown["Comment"], shown
    assert victim in shown["Comment"]
    assert difference(expected, left(results)) is None

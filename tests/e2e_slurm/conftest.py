"""Whole jobs on the test bed: `sbatch`, `srun tpwrap`, real kills and cuts, and the undisturbed run as the oracle."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Bed
from tests.cluster.fixtures import open_bed
from tests.e2e.conftest import EXAMPLES, RANKS, Run, assert_equal, undisturbed, wait_for
from tests.slurm_plugin.building import PLUGIN
from tests.slurm_plugin.plugin_bed import built
from tpwrap.core import events

__all__ = ["undisturbed"]
BIN = Path(sys.executable).parent
SECONDS = 180.0
FAILURE_TIMEOUT = 3
GPT = [
    str(EXAMPLES / "gpt.py"),
    *["--steps", "120", "--layers", "2", "--width", "32", "--heads", "2", "--context", "32"],
]


BATCH = """#!/bin/bash
#SBATCH -N {nodes} --ntasks-per-node={tasks} --gres=gpu:{tasks} --torchpass-spares={spares} {options}
srun {bin}/tpwrap {tpwrap_options} {bin}/python {script} --out {results}
"""


_submitted: list[Job] = []


@dataclass
class Job:
    """A job on a bed, and what it has left so far."""

    bed: Bed
    id: int
    results: Path
    run_dir: Path

    @property
    def run(self) -> Run:
        return Run(0, self.output, self.results, self.run_dir)

    @property
    def output(self) -> str:
        path = self.bed.share / f"slurm-{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def events(self, kind: type[Any]) -> list[Any]:
        return self.run.of(kind) if (self.run_dir / "events.jsonl").exists() else []

    def wait_step(self, step: int, seconds: float = 90) -> None:
        """Until rank 0 has committed `step`, after which the test breaks something."""
        path = self.results / "rank0.jsonl"
        try:
            wait_for(lambda: path.exists() and len(path.read_text().splitlines()) >= step, seconds)
        except AssertionError:
            raise AssertionError(f"step {step} is not reached:\n{self.output[-5000:]}\n{self.bed.logs()}") from None

    def node_of(self, rank: int) -> str:
        """Where `rank` was at the start."""
        node = next(e.node for e in self.events(events.WorkerAssigned) if e.rank == rank)
        return f"n{node + 1}"

    def spares(self) -> list[str]:
        return [f"n{node + 1}" for node in self.events(events.Arranged)[0].spares]

    def end(self, state: str = "COMPLETED", seconds: float = SECONDS) -> dict[str, str]:
        """Wait for the job's end; its fields as `scontrol show job` has them."""
        try:
            return self.bed.wait_job(self.id, {state}, seconds)
        except Exception:
            print(self.output[-6000:])
            raise

    def assert_equal(self, oracle: Run, replaced: set[int], ranks: int = RANKS) -> None:
        assert_equal(self.run, oracle, replaced, ranks)


def submit(
    bed: Bed,
    *,
    nodes: int = 2,
    tasks: int = 2,
    spares: int = 2,
    options: str = "",
    tpwrap_options: str = "",
    script: list[str] = GPT,
    batch: str = BATCH,
    env: dict[str, str] | None = None,
) -> Job:
    """What a user submits: `nodes` training nodes with `tasks` ranks each, and spares on top."""
    results = bed.share / "results"
    text = batch.format(
        nodes=nodes,
        tasks=tasks,
        spares=spares,
        options=options,
        bin=BIN,
        tpwrap_options=tpwrap_options,
        script=" ".join(script),
        results=results,
    )
    job = bed.sbatch(text, env={"TORCHPASS_FAILURE_TIMEOUT": str(FAILURE_TIMEOUT), **(env or {})})
    _submitted.append(Job(bed, job, results, bed.share / f"torchpass-{job}.0"))
    return _submitted[-1]


def bed_options(*slurm_conf: str, version: str = "22.05") -> dict[str, Any]:
    """A cluster with everything installed, and with settings of slurm.conf that would end a job at its first loss."""
    return {
        "nodes": 5,
        "gpus": 4,
        "version": version,
        "plugin": [f"optional {built(version) / 'torchpass.so'}"],
        "prolog": PLUGIN / "prolog",
        "epilog": PLUGIN / "epilog",
        "slurm_conf": ["SlurmdTimeout=120", "KillOnBadExit=1", "WaitTime=3", *slurm_conf],
    }


@contextmanager
def cluster(*slurm_conf: str, version: str = "22.05", **options: Any) -> Iterator[Bed]:
    """A bed with everything installed; what its jobs have said is shown if the test fails."""
    with open_bed(**bed_options(*slurm_conf, version=version), **options) as bed:
        try:
            yield bed
        finally:
            while _submitted:
                job = _submitted.pop()
                print(job.output[-6000:])
                print(bed.job(job.id))


@pytest.fixture
def bed() -> Iterator[Bed]:
    with cluster() as opened:
        yield opened

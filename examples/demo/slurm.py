"""The demo on real Slurm daemons: an ordinary user submits the job twice, and the second time a node is powered off."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from examples.demo import shown
from examples.demo.shown import console
from tests.cluster import Bed
from tpwrap.core import events

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
BATCH = """#!/bin/bash
#SBATCH -N 2 --ntasks-per-node=2 --gres=gpu:2 --torchpass-spares=2
srun tpwrap python {script} --steps {steps} --out {results}
"""
PATIENCE = 90.0


def build_plugin(directory: Path) -> Path:
    """The SPANK plugin, for the Slurm of this machine."""
    made = subprocess.run(
        ["make", "-C", str(REPOSITORY / "slurm_plugin"), f"BUILD={directory}"], capture_output=True, text=True
    )
    if made.returncode != 0:
        raise SystemExit(f"the plugin does not build:\n{made.stderr}")
    return directory / "torchpass.so"


class Job:
    """The training, submitted by alice."""

    def __init__(self, bed: Bed, name: str, steps: int) -> None:
        self.bed = bed
        self.results = bed.share / name
        script = REPOSITORY / "examples" / "gpt.py"
        text = BATCH.format(script=script, steps=steps, results=self.results)
        console.print(f"\n[bold]{name}[/]: sbatch as alice")
        console.print("    " + text.replace(str(script), "gpt.py").replace("\n", "\n    ").rstrip(), markup=False)
        path = bed.run(["printenv", "PATH"]).stdout.strip()
        env = {"PATH": f"{BIN}:{path}", "TORCHPASS_FAILURE_TIMEOUT": "3"}
        self.id = bed.sbatch(text, "--job-name", name, env=env)
        self.run_dir = bed.share / f"torchpass-{self.id}.0"
        self._printed = 0

    def follow(self, until_step: int | None) -> None:
        """Show the job's output until it has ended, or rank 0 has done `until_step`."""
        steps = self.results / "rank0.jsonl"
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self._print()
            if until_step is not None and steps.exists() and len(steps.read_text().splitlines()) >= until_step:
                return
            if self.bed.job(self.id)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING"):
                self._print()
                if until_step is not None:
                    raise SystemExit("the job ended before its node could be killed")
                return
            time.sleep(0.1)
        raise SystemExit(f"the job does not end:\n{self.bed.logs()}")

    def _print(self) -> None:
        path = self.bed.share / f"slurm-{self.id}.out"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        for line in lines[self._printed :]:
            if "socket.cpp" not in line:  # torch looks for names of addresses that the bed's resolver does not have
                console.print("  " + line, markup=False)
        self._printed = len(lines)

    def of(self, kind: type[events.Event]) -> list[events.Event]:
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [e for _, e in map(events.from_line, lines) if isinstance(e, kind)]

    def node_of(self, rank: int) -> str:
        for event in self.of(events.WorkerAssigned):
            if isinstance(event, events.WorkerAssigned) and event.rank == rank:
                return f"n{event.node + 1}"
        raise SystemExit(f"rank {rank} was given to nobody")


def say(bed: Bed, *argv: str) -> None:
    console.print(f"\n[bold]$ {' '.join(argv)}[/]")
    console.print(bed.run(list(argv)).stdout.rstrip(), markup=False)


def main(steps: int) -> int:
    """BedUnavailable where no cluster can be booted."""
    with tempfile.TemporaryDirectory(prefix="torchpass-demo-") as directory:
        Path(directory).chmod(0o755)
        build_plugin(Path(directory))
        console.print("booting 5 nodes with real munged, slurmctld and slurmd …")
        bed = Bed(nodes=5, gpus=4, slurm_conf=["SlurmdTimeout=120"], expose=[directory], **plugin_options(directory))
        with bed:
            console.print(bed.run(["sinfo"]).stdout.rstrip(), markup=False)
            return show(bed, steps)


def plugin_options(directory: str) -> dict[str, Any]:
    return {
        "plugin": [f"optional {Path(directory) / 'torchpass.so'}"],
        "prolog": REPOSITORY / "slurm_plugin" / "prolog",
        "epilog": REPOSITORY / "slurm_plugin" / "epilog",
    }


def show(bed: Bed, steps: int) -> int:
    began = time.monotonic()
    plain = Job(bed, "undisturbed", steps)
    plain.follow(None)
    plain_seconds = time.monotonic() - began
    began = time.monotonic()
    healed = Job(bed, "node-lost", steps)
    healed.follow(steps // 4)
    victim = healed.node_of(2)
    console.print(f"\n[red bold]powering off {victim}[/], which holds ranks 2 and 3\n")
    bed.kill(victim)
    healed.follow(None)
    seconds = time.monotonic() - began
    say(bed, "squeue", "--states=all", "--format=%i %j %T %D %N")
    say(bed, "scontrol", "show", "job", str(healed.id))
    say(bed, "scontrol", "show", "node", victim)
    console.print()
    console.print(shown.loss_curve(plain.results, healed.results, rank=2))
    happened = shown.failovers(healed.run_dir)
    if len(happened) != 1:
        console.print(f"[red]expected one failover, saw {len(happened)}[/]")
        return 1
    console.print(shown.pause(happened[0], victim))
    survivors = [rank for rank in range(4) if rank not in happened[0].ranks]
    for rank in survivors:
        pid = json.loads((healed.results / f"final{rank}.json").read_text())["pid"]
        assigned = [e.pid for e in healed.of(events.WorkerAssigned) if isinstance(e, events.WorkerAssigned)]
        if pid not in assigned[:4]:
            console.print(f"[red]rank {rank} changed its process[/]")
            return 1
    states = {bed.job(job.id)["JobState"] for job in (plain, healed)}
    if states != {"COMPLETED"} or "DRAIN" not in bed.node(victim)["State"]:
        console.print(f"[red]the jobs are {states}, {victim} is {bed.node(victim)['State']}[/]")
        return 1
    times = f"{plain_seconds:.0f} s undisturbed, {seconds:.0f} s with the loss of a node."
    return shown.verdict(plain.results, healed.results, survivors, steps, times)

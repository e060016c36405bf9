"""How long does a job stand still when a rank, or a node, is killed? Beside torchrun, in paired runs.

    python -m benchmarks.pause [--pairs 5] [--torchft-python PATH/TO/python]

All on this machine: 4 ranks, DDP, gloo, SIGKILL in the middle of a backward pass. *Pause*: from the kill to the first
update after the standstill. *Back*: to the first update beyond the furthest one before the kill
(torchrun restarts all processes and redoes the steps since its last checkpoint, which the script writes every 50).

With an interpreter that has torch and torchft (0.2.0 installs beside torch 2.13: `pip install torch==2.13.0 torchft`),
torchft is measured as well, one process a replica group, with time-outs of 10 s (its default is 60 s). It does
something else: the step that was hit is thrown away with the batches of all groups, the next ones are computed by fewer
groups until the killed one is back, and the numbers differ from those of a run without failure. Nothing is redone. It
stands still until the last survivor's operation has failed: one that does not talk to the dead directly waits for the
time-out of its gloo operation. See benchmarks/mlp_torchft.py for what had to be written around.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.running import RANKS, step_times, under_torchft, under_torchrun, under_tpwrap
from tpwrap.core import events

KILL_STEP = 70
KINDS = (("rank", 0, ()), ("node", 1, ()), ("hsdp", 0, ("--hsdp",)))
"""name, spare nodes, arguments of the script"""
ARGUMENTS = ["--steps", "110"]


def pause_and_back(out: Path, killed: float) -> tuple[float, float]:
    """Seconds, seen by rank 0, which survives. The job stands still in the longest gap between two of its updates: an
    update right after the kill may be the last one to which the victim had already contributed."""
    times = step_times(out, 0)
    pairs = enumerate(itertools.pairwise(times))
    gaps = [(after[1] - before[1], at) for at, (before, after) in pairs if after[1] > killed]
    at = max(gaps)[1]
    furthest = max(step for step, _ in times[: at + 1])
    resumed = times[at + 1][1]
    return resumed - killed, next(when for step, when in times[at + 1 :] if step > furthest) - killed


def tpwrap_run(
    out: Path, fault: str, spares: int, more: tuple[str, ...] = ()
) -> tuple[tuple[float, float], dict[str, float]]:
    under_tpwrap("mlp.py", out, [*ARGUMENTS, *more], [fault], spares)
    found = [events.from_line(line) for line in (out / "run" / "events.jsonl").read_text().splitlines()]
    killed = next(when for when, event in found if isinstance(event, events.FaultInjected))
    finished = next(event for _, event in found if isinstance(event, events.FailoverFinished))
    return pause_and_back(out, killed), finished.stages


def torchrun_run(out: Path) -> tuple[float, float]:
    under_torchrun("mlp.py", out, [*ARGUMENTS, "--checkpoint-every", "50", "--kill-step", str(KILL_STEP)], restarts=3)
    return pause_and_back(out, float((out / "killed.txt").read_text()))


def torchft_run(out: Path, python: str) -> tuple[tuple[float, float], dict[str, int]]:
    under_torchft(python, "mlp_torchft.py", out, [*ARGUMENTS, "--kill-step", str(KILL_STEP)])
    return pause_and_back(out, float((out / "killed.txt").read_text())), json.loads((out / "lost0.json").read_text())


def has_torchft(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", "import torchft"], stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="paired runs (default 5; about 70 s each)")
    parser.add_argument("--torchft-python", metavar="PYTHON", help="measure torchft too; PYTHON can import it")
    args = parser.parse_args()
    pairs = args.pairs
    if args.torchft_python and not has_torchft(args.torchft_python):
        parser.error(f"--torchft-python: {args.torchft_python} cannot import torchft; --help tells how to install it")
    console = Console()
    pauses: dict[str, list[tuple[float, float]]] = {"rank": [], "node": [], "hsdp": [], "torchrun": []}
    stages: dict[str, list[dict[str, float]]] = {kind: [] for kind, _, _ in KINDS}
    lost: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for pair in track(range(pairs), "paired runs", console=console):
            for kind, spares, more in KINDS:
                fault = f"{'node' if kind == 'node' else 'rank'}=1 step={KILL_STEP} phase=backward kill"
                pause, by_stage = tpwrap_run(root / f"{kind}{pair}", fault, spares, more)
                pauses[kind].append(pause)
                stages[kind].append(by_stage)
            pauses["torchrun"].append(torchrun_run(root / f"torchrun{pair}"))
            if args.torchft_python:
                pause, losses = torchft_run(root / f"torchft{pair}", args.torchft_python)
                pauses.setdefault("torchft", []).append(pause)
                lost.append(losses)
    title = f"SIGKILL at step {KILL_STEP}: median (min–max) of {pairs}"
    table = Table("", "pause, s", "back, s", "steps redone", "batches lost", title=title)
    names = {
        "rank": "tpwrap, a rank",
        "node": "tpwrap, a node (1 spare)",
        "hsdp": "tpwrap, a rank of HSDP",
        "torchrun": "torchrun --max-restarts 3, a rank",
    }
    redone = {"rank": "0", "node": "0", "hsdp": "0", "torchrun": str(KILL_STEP - 50)}
    batches = dict.fromkeys(names, "0")
    if lost:
        names["torchft"] = "torchft, a replica group"
        redone["torchft"] = "0"
        # In a dropped step every group's batch is lost; in one with fewer groups, those of the absent ones.
        batches["torchft"] = f"{statistics.median(RANKS * one['dropped'] + one['fewer'] for one in lost):g}"
    for kind, name in names.items():
        pause, back = ([one[i] for one in pauses[kind]] for i in (0, 1))
        table.add_row(name, spread(pause), spread(back), redone[kind], batches[kind])
    console.print(table)
    ours = [kind for kind, _, _ in KINDS]
    for kind in ours:
        for other in sorted(pauses.keys() - set(ours), reverse=True):
            ratios = [mine[0] / theirs[0] for mine, theirs in zip(pauses[kind], pauses[other], strict=True)]
            console.print(f"pause, tpwrap ({kind}) / {other}, pair by pair: {spread(ratios)}")
    heads = [names[kind].removeprefix("tpwrap, ") for kind in ours]
    table = Table("stage, ms", *heads, title="tpwrap's pause by stage, medians")
    for stage in stages["rank"][0]:
        medians = [1000 * statistics.median(s[stage] for s in stages[kind]) for kind in ours]
        table.add_row(stage, *(f"{ms:.0f}" for ms in medians))
    console.print(table)


if __name__ == "__main__":
    main()

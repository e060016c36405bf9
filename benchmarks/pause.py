"""How long does a job stand still when a rank, or a node, is killed? Beside torchrun, in paired runs.

    python benchmarks/pause.py [--pairs 5]

All on this machine: 4 ranks, DDP, gloo, SIGKILL in the middle of a backward pass. *Pause*: from the kill to the first
update after the standstill. *Back*: to the first update beyond the furthest one before the kill
(torchrun restarts all processes and redoes the steps since its last checkpoint, which the script writes every 50).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.running import step_times, under_torchrun, under_tpwrap
from tpwrap.core import events

KILL_STEP = 70
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


def tpwrap_run(out: Path, fault: str, spares: int) -> tuple[tuple[float, float], dict[str, float]]:
    under_tpwrap("mlp.py", out, ARGUMENTS, [fault], spares)
    found = [events.from_line(line) for line in (out / "run" / "events.jsonl").read_text().splitlines()]
    killed = next(when for when, event in found if isinstance(event, events.FaultInjected))
    finished = next(event for _, event in found if isinstance(event, events.FailoverFinished))
    return pause_and_back(out, killed), finished.stages


def torchrun_run(out: Path) -> tuple[float, float]:
    under_torchrun(
        "mlp.py", out, [*ARGUMENTS, "--checkpoint-every", "50", "--kill-step", str(KILL_STEP)], restarts=3
    )
    return pause_and_back(out, float((out / "killed.txt").read_text()))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="paired runs (default 5; about 70 s each)")
    pairs = parser.parse_args().pairs
    console = Console()
    pauses: dict[str, list[tuple[float, float]]] = {"rank": [], "node": [], "torchrun": []}
    stages: dict[str, list[dict[str, float]]] = {"rank": [], "node": []}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for pair in track(range(pairs), "paired runs", console=console):
            for kind, spares in (("rank", 0), ("node", 1)):
                fault = f"{kind}=1 step={KILL_STEP} phase=backward kill"
                pause, by_stage = tpwrap_run(root / f"{kind}{pair}", fault, spares)
                pauses[kind].append(pause)
                stages[kind].append(by_stage)
            pauses["torchrun"].append(torchrun_run(root / f"torchrun{pair}"))
    title = f"SIGKILL at step {KILL_STEP}: median (min–max) of {pairs}"
    table = Table("", "pause, s", "back, s", "steps redone", title=title)
    names = {
        "rank": "tpwrap, a rank",
        "node": "tpwrap, a node (1 spare)",
        "torchrun": "torchrun --max-restarts 3, a rank",
    }
    redone = {"rank": "0", "node": "0", "torchrun": str(KILL_STEP - 50)}
    for kind, name in names.items():
        table.add_row(name, spread([p for p, _ in pauses[kind]]), spread([b for _, b in pauses[kind]]), redone[kind])
    console.print(table)
    for kind in ("rank", "node"):
        ratios = [mine[0] / theirs[0] for mine, theirs in zip(pauses[kind], pauses["torchrun"], strict=True)]
        console.print(f"pause, tpwrap ({kind}) / torchrun, pair by pair: {spread(ratios)}")
    table = Table("stage, ms", "a rank", "a node", title="tpwrap's pause by stage, medians")
    for stage in stages["rank"][0]:
        medians = [1000 * statistics.median(s[stage] for s in stages[kind]) for kind in ("rank", "node")]
        table.add_row(stage, *(f"{ms:.0f}" for ms in medians))
    console.print(table)


if __name__ == "__main__":
    main()

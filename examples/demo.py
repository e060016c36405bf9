"""The main job, shown: a training run loses a node in the middle of a backward pass and ends with the same numbers.

    python examples/demo.py            (make demo does the set-up first)

Trains examples/gpt.py twice on four emulated nodes: once undisturbed, once with a node killed by SIGKILL and one spare
to replace it. Then compares every loss, every sample and the final weights of all ranks. Exits with 1 if anything
differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tpwrap.core import events
from tpwrap.report import compare

HERE = Path(__file__).resolve().parent
console = Console(highlight=False)


def train(name: str, root: Path, steps: int, faults: list[str]) -> tuple[Path, Path, float]:
    """One run of gpt.py under tpwrap; returns its results, its run directory and its seconds."""
    results, run_dir = root / name / "results", root / name / "run"
    inject = [word for fault in faults for word in ("--inject", fault)]
    launcher = [sys.executable, "-m", "tpwrap", "--nodes", "4", "--spares", "1", "--run-dir", str(run_dir)]
    script = [sys.executable, str(HERE / "gpt.py"), "--steps", str(steps), "--out", str(results)]
    shown = "".join(f"--inject '{fault}' " for fault in faults)
    console.print(f"\n[bold]{name}[/]: tpwrap --nodes 4 --spares 1 {shown}python gpt.py --steps {steps}")
    began = time.monotonic()
    code = subprocess.run([*launcher, *inject, *script], check=False).returncode
    if code != 0:
        console.print(f"[red]the run ended with exit code {code}; its events: torchpass events {run_dir}[/]")
        sys.exit(1)
    return results, run_dir, time.monotonic() - began


def failovers(run_dir: Path) -> list[events.FailoverFinished]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [e for _, e in map(events.from_line, lines) if isinstance(e, events.FailoverFinished)]


def loss_curve(a: Path, b: Path, steps: int) -> Table:
    """Losses of rank 1, the one that is lost, beside each other."""
    table = Table("step", "undisturbed", "node lost", "", title="Loss of rank 1 (hexadecimal floats: every bit)")
    left, right = (compare.read(directory).steps[1] for directory in (a, b))
    for step in sorted({1, *range(steps // 8, steps + 1, max(1, steps // 8)), steps // 2, steps // 2 + 1, steps}):
        x, y = left[step]["loss"], right[step]["loss"]
        table.add_row(str(step), f"{float.fromhex(x):.6f}  {x}", f"{float.fromhex(y):.6f}  {y}", "=" if x == y else "≠")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run (default 60)")
    arguments = parser.parse_args()
    step = arguments.steps // 2
    with tempfile.TemporaryDirectory(prefix="torchpass-demo-") as directory:
        root = Path(directory)
        plain, _, plain_seconds = train("undisturbed", root, arguments.steps, [])
        healed, run_dir, healed_seconds = train(
            "node-lost", root, arguments.steps, [f"node=1 step={step} phase=backward kill"]
        )
        console.print()
        console.print(loss_curve(plain, healed, arguments.steps))
        happened = failovers(run_dir)
        if len(happened) != 1:
            console.print(f"[red]expected one failover, saw {len(happened)}[/]")
            return 1
        event = happened[0]
        table = Table("stage", "ms", title=f"The pause: node 1 was lost in step {event.step}; {event.reason}")
        for stage, seconds in event.stages.items():
            table.add_row(stage, f"{1000 * seconds:.0f}")
        table.add_row("[bold]all[/]", f"[bold]{1000 * event.seconds:.0f}[/]")
        console.print(table)
        survivors = sum(
            json.loads((healed / f"final{rank}.json").read_text())["objects"] == "ok" for rank in (0, 2, 3)
        )
        difference = compare.compare(plain, healed)
        if difference is not None or survivors != 3:
            console.print(f"[red bold]NOT EQUAL[/]: {difference or 'a survivor lost its objects'}")
            return 1
        lines = 4 * arguments.steps
        console.print(
            f"[green bold]EQUAL[/]: {lines} losses, the samples of {lines} steps, and the final weights and optimizer "
            f"state of 4 ranks agree bit for bit;\n3 survivors kept process and objects. "
            f"({plain_seconds:.0f} s undisturbed, {healed_seconds:.0f} s with the loss of a node.)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

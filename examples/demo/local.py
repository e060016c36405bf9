"""The demo on four emulated nodes: once undisturbed, once with a node killed by SIGKILL in the middle of a backward
pass, and one spare to replace it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from examples.demo import shown
from examples.demo.shown import console

SCRIPT = Path(__file__).resolve().parent.parent / "gpt.py"


def train(name: str, root: Path, steps: int, faults: list[str]) -> tuple[Path, Path, float]:
    """One run of gpt.py under tpwrap; returns its results, its run directory and its seconds."""
    results, run_dir = root / name / "results", root / name / "run"
    inject = [word for fault in faults for word in ("--inject", fault)]
    launcher = [sys.executable, "-m", "tpwrap", "--nodes", "4", "--spares", "1", "--run-dir", str(run_dir)]
    script = [sys.executable, str(SCRIPT), "--steps", str(steps), "--out", str(results)]
    options = "".join(f"--inject '{fault}' " for fault in faults)
    console.print(f"\n[bold]{name}[/]: tpwrap --nodes 4 --spares 1 {options}python gpt.py --steps {steps}")
    began = time.monotonic()
    code = subprocess.run([*launcher, *inject, *script], check=False).returncode
    if code != 0:
        console.print(f"[red]the run ended with exit code {code}; its events: torchpass events {run_dir}[/]")
        sys.exit(1)
    return results, run_dir, time.monotonic() - began


def main(steps: int) -> int:
    step = steps // 2
    with tempfile.TemporaryDirectory(prefix="torchpass-demo-") as directory:
        root = Path(directory)
        plain, _, plain_seconds = train("undisturbed", root, steps, [])
        healed, run_dir, seconds = train("node-lost", root, steps, [f"node=1 step={step} phase=backward kill"])
        console.print()
        console.print(shown.loss_curve(plain, healed, rank=1))
        happened = shown.failovers(run_dir)
        if len(happened) != 1:
            console.print(f"[red]expected one failover, saw {len(happened)}[/]")
            return 1
        console.print(shown.pause(happened[0], "node 1"))
        times = f"{plain_seconds:.0f} s undisturbed, {seconds:.0f} s with the loss of a node."
        return shown.verdict(plain, healed, [0, 2, 3], steps, times)

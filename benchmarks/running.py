"""Start a script under tpwrap or torchrun, on one machine, for the benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RANKS = 4


def environment() -> dict[str, str]:
    bin_dir = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def under_tpwrap(script: str, out: Path, arguments: list[str], faults: list[str], spares: int = 0) -> None:
    """Raises subprocess.CalledProcessError when the run fails."""
    inject = [word for fault in faults for word in ("--inject", fault)]
    launcher = [sys.executable, "-m", "tpwrap", "--nodes", str(RANKS), "--spares", str(spares), "--quiet"]
    _run([*launcher, "--run-dir", str(out / "run"), *inject, sys.executable, str(HERE / script)], out, arguments)


def under_torchrun(script: str, out: Path, arguments: list[str], restarts: int = 0) -> None:
    """torchrun with one agent for all ranks. Raises subprocess.CalledProcessError when the run fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    _run([*launcher, f"--max-restarts={restarts}", str(HERE / script)], out, arguments)


def _run(command: list[str], out: Path, arguments: list[str]) -> None:
    out.mkdir(parents=True)
    # Without it, torchrun 2.13 cannot restart gloo jobs at all (workers read addresses of the attempt before).
    env = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (out / "output.txt").open("wb") as log:
        subprocess.run(
            [*command, "--out", str(out), *arguments],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, check=True, timeout=300,
        )  # fmt: skip


def step_times(out: Path, rank: int) -> list[tuple[int, float]]:
    """(step, when its update was applied) as the rank's processes wrote them."""
    lines = (out / f"times{rank}.txt").read_text().split("\n")
    return [(int(step), float(when)) for step, when in (line.split() for line in lines if line)]

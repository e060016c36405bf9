"""Start a script under tpwrap or torchrun, on one machine, for the benchmarks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
RANKS = 4


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}


def under_tpwrap(script: str, out: Path, arguments: list[str], faults: list[str], spares: int = 0) -> None:
    """Raises subprocess.CalledProcessError when the run fails."""
    inject = [word for fault in faults for word in ("--inject", fault)]
    launcher = [sys.executable, "-m", "tpwrap", "--nodes", str(RANKS), "--spares", str(spares), "--quiet"]
    _run([*launcher, "--run-dir", str(out / "run"), *inject, sys.executable, str(HERE / script)], out, arguments)


def under_torchrun(script: str, out: Path, arguments: list[str], restarts: int = 0) -> None:
    """torchrun with one agent for all ranks. Raises subprocess.CalledProcessError when the run fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    _run([*launcher, f"--max-restarts={restarts}", str(HERE / script)], out, arguments)


def under_torchft(python: str, script: str, out: Path, arguments: list[str]) -> None:
    """torchft's lighthouse, and RANKS replica groups of one process each; one that is killed is started again at once.

    python: an interpreter with torch and torchft. Raises RuntimeError when a group fails otherwise.
    """
    out.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    env = {**environment(), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    lighthouse = [str(Path(python).parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}"]
    lighthouse += ["--min_replicas", str(RANKS - 1), "--join_timeout_ms", "10000"]
    running: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], log: str) -> subprocess.Popen[bytes]:
        with (out / log).open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env
            )
        running.append(process)
        return process

    def group(rank: int) -> subprocess.Popen[bytes]:
        command = [python, str(HERE / script), "--out", str(out), "--rank", str(rank), *arguments]
        return start(command, f"output{rank}.txt")

    try:
        start(lighthouse, "lighthouse.txt")
        groups = {rank: group(rank) for rank in range(RANKS)}
        end = time.monotonic() + 300.0
        while groups:
            for rank, process in list(groups.items()):
                code = process.poll()
                if code == 0:
                    del groups[rank]
                elif code == -signal.SIGKILL:
                    groups[rank] = group(rank)
                elif code is not None or time.monotonic() > end:
                    raise RuntimeError(f"torchft: group {rank} ended with {code}; see {out}/output{rank}.txt")
            time.sleep(0.02)
    finally:
        for process in running:
            process.kill()
            process.wait()


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

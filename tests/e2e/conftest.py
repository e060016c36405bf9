"""Whole runs: `tpwrap` on emulated nodes, real kills, and the undisturbed run as the oracle."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tpwrap.core import events
from tpwrap.report import compare

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
SCRIPTS = Path(__file__).resolve().parent / "scripts"
RANKS = 4
SECONDS = 150.0
"""A run that takes longer hangs. Undisturbed ones take about 8 s on two free cores."""

GPT = [
    str(EXAMPLES / "gpt.py"),
    *["--steps", "12", "--layers", "2", "--width", "32", "--heads", "2", "--context", "32"],
]
DIGITS = [
    str(EXAMPLES / "digits.py"),
    *["--epochs", "3", "--steps-per-epoch", "8", "--batch-size", "4", "--width", "4"],
]
EXAMPLE = {"gpt": GPT, "digits": DIGITS}


MARK = "TPWRAP_E2E_RUN"
"""in the environment of every process of a run: its run directory"""


@dataclass
class Run:
    """What a run has left."""

    code: int
    output: str
    results: Path
    run_dir: Path

    @property
    def events(self) -> list[events.Event]:
        return [event for _, event in map(events.from_line, (self.run_dir / "events.jsonl").read_text().splitlines())]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def final(self, rank: int) -> dict[str, Any]:
        final: dict[str, Any] = json.loads((self.results / f"final{rank}.json").read_text())
        return final

    def first_pid(self, rank: int) -> int:
        """The process that held `rank` at the start."""
        return next(int(e.pid) for e in self.of(events.WorkerAssigned) if e.rank == rank)


def tpwrap(
    directory: Path,
    script: list[str],
    faults: list[str] | tuple[str, ...] = (),
    *,
    nodes: int = RANKS,
    spares: int = 0,
    options: tuple[str, ...] = (),
    command: tuple[str, ...] = (sys.executable,),
    during: Callable[[Path], None] | None = None,
    variables: dict[str, str] | None = None,
) -> Run:
    """Run a script under tpwrap. during: called once it has started, with the run directory. variables: of the
    environment, beside ours."""
    results, run_dir = directory / "results", directory / "run"
    inject = [word for fault in faults for word in ("--inject", fault)]
    launcher = [sys.executable, "-m", "tpwrap", "--nodes", str(nodes), "--spares", str(spares)]
    launcher += ["--run-dir", str(run_dir), *options, *inject]
    log = directory / "output.txt"
    directory.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*launcher, *command, *script, "--out", str(results)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=REPOSITORY,
            env={**environment(), **(variables or {}), MARK: str(run_dir)},
        )
        code = attend(process, run_dir, log, during)
    return Run(code, log.read_text(errors="replace"), results, run_dir)


def attend(
    process: subprocess.Popen[bytes], run_dir: Path, log: Path, during: Callable[[Path], None] | None
) -> int:
    """The exit code of a launcher. during: see `tpwrap`. One that hangs is ended, and its output shown."""
    try:
        if during is not None:
            during(run_dir)
        return process.wait(SECONDS)
    except BaseException:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        print(log.read_text(errors="replace")[-6000:])
        raise


def environment() -> dict[str, str]:
    """Ours, with the virtual environment's python first, as a user has it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHPASS_", "PYTEST_"))}
    return {**env, "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}


def processes_of(run_dir: Path) -> dict[int, str]:
    """What lives of a run: pid -> the name it calls itself by."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={run_dir}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found[int(pid)] = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
    return found


def assert_equal(
    run: Run,
    undisturbed: Run,
    replaced: set[int] = frozenset(),  # type: ignore[assignment]
    ranks: int = RANKS,
) -> None:
    """The oracle: exit code 0, every loss, sample and final weight equal to the bit, every sample served once, and the
    survivors still in the process, and with the objects, that they started with."""
    assert run.code == 0, run.output[-6000:]
    assert compare.compare(undisturbed.results, run.results) is None
    for rank in set(range(ranks)) - replaced:
        assert run.final(rank)["pid"] == run.first_pid(rank), f"rank {rank} changed its process"
    for rank in range(ranks):
        assert run.final(rank)["objects"] == "ok"


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("the awaited did not happen")


def common_directory(factory: pytest.TempPathFactory) -> Path:
    """One directory for all processes of this test session."""
    root = factory.getbasetemp()
    return root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The oracle's run of a script, made once for all test processes."""
    root = common_directory(tmp_path_factory)
    made: dict[str, Run] = {}

    def get(name: str, script: list[str], **options: Any) -> Run:
        directory = root / "undisturbed" / name
        directory.parent.mkdir(exist_ok=True)
        with (directory.parent / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if name not in made:
                done = directory / "done"
                if done.exists():
                    made[name] = Run(0, "", directory / "results", directory / "run")
                else:
                    made[name] = tpwrap(directory, script, **options)
                    assert made[name].code == 0, made[name].output[-6000:]
                    done.touch()
        return made[name]

    return get

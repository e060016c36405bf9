"""Runs of training scripts as users write them: alone, as the oracle, and under `tpwrap` with a failure."""

from __future__ import annotations

import fcntl
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.conftest import MARK, SECONDS, Run, attend, common_directory, environment
from tests.unchanged.catalogue import OUTPUT, RANKS, Script
from tpwrap.core import events


@dataclass
class Left:
    """What a script has left: its files, and the lines of each rank."""

    files: Path
    lines: dict[int, list[str]]


def alone(directory: Path, script: Script) -> Left:
    """Run it without tpwrap: one process a rank, started as torchrun does."""
    directory.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        numbers = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        env = environment() | script.environment | {name: str(value) for name, value in numbers.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (directory / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    script.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory, env=env
                )
            )
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = [directory / f"rank{rank}.log" for rank in range(RANKS)]
    assert codes == [0] * RANKS, "\n".join(log.read_text()[-2000:] for log in logs)
    return left(directory, directory, script)


def under_tpwrap(
    directory: Path,
    script: Script,
    faults: tuple[str, ...] = (),
    *,
    options: tuple[str, ...] = (),
    during: Callable[[Path], None] | None = None,
) -> Run:
    """Run it under tpwrap. during: called once it has started, with the run directory."""
    directory.mkdir(parents=True, exist_ok=True)
    run_dir = directory / "run"
    launcher = [sys.executable, "-m", "tpwrap", "--nodes", str(RANKS), "--spares", "1", "--run-dir", str(run_dir)]
    launcher += [*options, *(word for fault in faults for word in ("--inject", fault))]
    log = directory / "output.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*launcher, *script.command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=environment() | script.environment | {MARK: str(run_dir)},
        )
        code = attend(process, run_dir, log, during)
    return Run(code, log.read_text(errors="replace"), directory / OUTPUT, run_dir)


def left(directory: Path, logs: Path, script: Script) -> Left:
    return Left(
        directory / OUTPUT,
        {rank: script.told(log_of(logs, rank)) for rank in range(RANKS)},
    )


def log_of(logs: Path, rank: int) -> str:
    """Empty for a rank that has said nothing, and so has no file."""
    file = logs / f"rank{rank}.log"
    return file.read_text() if file.exists() else ""


def shown(output: str, rank: int, script: Script) -> list[str]:
    """The lines of one rank on the terminal."""
    prefix = f"[rank {rank}] "
    lines = [line.removeprefix(prefix) for line in output.split("\n") if line.startswith(prefix)]
    return script.told("".join(f"{line}\n" for line in lines))


def assert_equal(run: Run, oracle: Left, script: Script, replaced: set[int], failovers: int) -> None:
    """Exit code 0; every file and every line as without tpwrap, to the bit and in order, each once; the survivors still
    in the process that they started with; and as many failovers as there were failures."""
    assert run.code == 0, run.output[-6000:]
    assert len(run.of(events.FaultInjected)) == failovers, "the fault was not injected"
    here = left(run.results.parent, run.run_dir / "logs", script)
    for rank in range(RANKS):
        differ = first_difference(oracle.lines[rank], here.lines[rank])
        assert not differ, f"the log of rank {rank} (replaced: {replaced}): {differ}"
        differ = first_difference(oracle.lines[rank], shown(run.output, rank, script))
        assert not differ, f"rank {rank} on the terminal (replaced: {replaced}): {differ}"
    assert names(here.files) == names(oracle.files)
    for name in names(oracle.files):
        differ = file_difference(oracle.files / name, here.files / name)
        assert not differ, f"{name} (replaced: {replaced}): {differ}"
    processes: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    for event in run.of(events.WorkerAssigned):
        processes[event.rank].add(event.pid)
    assert {rank for rank, pids in processes.items() if len(pids) > 1} == replaced
    assert len(run.of(events.FailoverStarted)) == run.of(events.JobEnded)[0].failovers == failovers


def names(directory: Path) -> list[str]:
    """All files, by their paths in it."""
    return sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())


def first_difference(expected: list[str], actual: list[str]) -> str:
    """ "" if equal, else the first line that differs."""
    if expected == actual:
        return ""
    for number, (one, other) in enumerate(zip(expected, actual, strict=False)):
        if one != other:
            return f"line {number} should be {one!r} and is {other!r} ({len(expected)} and {len(actual)} lines)"
    longer, more = (expected, "missing") if len(expected) > len(actual) else (actual, "too much")
    return f"line {min(len(expected), len(actual))} is {more}: {longer[min(len(expected), len(actual))]!r}"


def file_difference(expected: Path, actual: Path) -> str:
    """ "" if equal. Files of torch.save are equal if what they hold is, to the bit: pickle also writes down which equal
    strings are one object, and that is nobody's result."""
    if expected.read_bytes() == actual.read_bytes():
        return ""
    if re.search(r"\.(pt|pth|tar|ckpt)$", expected.name):
        one, other = (torch.load(file, weights_only=False) for file in (expected, actual))
        return value_difference(one, other, "")
    try:
        return first_difference(expected.read_text().split("\n"), actual.read_text().split("\n"))
    except UnicodeDecodeError:
        return f"{expected.stat().st_size} and {actual.stat().st_size} bytes differ"


def value_difference(expected: Any, actual: Any, where: str) -> str:
    """ "" if equal to the bit, else where they differ first."""
    if type(expected) is not type(actual):
        return f"{where}: {type(expected).__name__} is now {type(actual).__name__}"
    if isinstance(expected, dict):
        if list(expected) != list(actual):
            return f"{where}: keys {list(expected)} are now {list(actual)}"
        pairs = [(expected[key], actual[key], f"{where}[{key!r}]") for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return f"{where}: length {len(expected)} is now {len(actual)}"
        pairs = [(one, other, f"{where}[{i}]") for i, (one, other) in enumerate(zip(expected, actual, strict=True))]
    elif isinstance(expected, torch.Tensor):
        same = expected.dtype == actual.dtype and expected.shape == actual.shape
        same = same and expected.requires_grad == actual.requires_grad
        raw = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (expected, actual)]
        return "" if same and torch.equal(*raw) else f"{where}: {expected} is now {actual}"
    elif isinstance(expected, np.ndarray):
        same = expected.dtype == actual.dtype and expected.shape == actual.shape
        return "" if same and expected.tobytes() == actual.tobytes() else f"{where}: {expected} is now {actual}"
    elif isinstance(expected, float):
        return "" if expected.hex() == actual.hex() else f"{where}: {expected!r} is now {actual!r}"
    elif hasattr(expected, "__dict__"):
        pairs = [(vars(expected), vars(actual), where)]
    else:
        return "" if expected == actual else f"{where}: {expected!r} is now {actual!r}"
    return next(filter(None, (value_difference(*pair) for pair in pairs)), "")


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Script], Left]:
    """What a script leaves when it runs alone, made once for all test processes."""
    root = common_directory(tmp_path_factory) / "alone"

    def get(script: Script) -> Left:
        root.mkdir(exist_ok=True)
        directory = root / script.name.replace("/", "-")
        with (root / f"{directory.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = root / f"{directory.name}.done"
            if not done.exists():
                alone(directory, script)
                done.touch()
        return left(directory, directory, script)

    return get

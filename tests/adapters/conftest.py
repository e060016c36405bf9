"""The frameworks' examples: alone, as the oracle, and under `tpwrap` with failures; and what they leave, as values."""

from __future__ import annotations

import fcntl
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import MARK, REPOSITORY, Run, common_directory, environment

RANKS = 3
SECONDS = 280.0
EXAMPLES = REPOSITORY / "examples" / "frameworks"
CLOCK = ("runtime", "_per_second", "model_preparation_time")
"""in names of numbers that come from a clock"""
NOT_COMPARED = ("training_args.bin", "events.out.tfevents", ".metadata")
"""in names of files that hold times, hosts or process ids"""


@dataclass(frozen=True)
class Example:
    """One framework's example. needs: the module without which it cannot run."""

    name: str
    needs: str
    arguments: tuple[str, ...]
    kills: tuple[str, ...]
    """at the first step, in the middle of an epoch, in an evaluation, at the last step"""

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(EXAMPLES / self.arguments[0]), *self.arguments[1:]]


def kills(*places: str) -> tuple[str, ...]:
    """A kill of each rank in turn."""
    return tuple(f"rank={(number + 1) % RANKS} {place} kill" for number, place in enumerate(places))


EXAMPLE = {
    example.name: example
    for example in (
        Example(
            "trainer",
            "transformers",
            ("hf_trainer.py", "--output_dir", "out"),
            kills(
                "step=0 phase=backward", "step=4 phase=backward", "step=5 phase=collective:1", "step=15 phase=backward"
            ),
        ),
        Example(
            "accelerate",
            "accelerate",
            ("accelerate_loop.py", "--output-dir", "out"),
            kills(
                "step=0 phase=backward", "step=4 phase=backward", "step=6 phase=collective:0", "step=11 phase=backward"
            ),
        ),
        Example(
            "lightning",
            "lightning",
            ("lightning_module.py", "--output-dir", "out", "--nodes", "3", "--devices", "1"),
            kills(
                "step=0 phase=backward", "step=4 phase=backward", "step=6 phase=collective:0", "step=11 phase=backward"
            ),
        ),
        Example(
            "titan",
            "torchtitan",
            ("titan.py", "--dump_folder", "out"),
            kills(
                "step=0 phase=backward", "step=4 phase=backward", "step=5 phase=collective:3", "step=11 phase=backward"
            ),
        ),
    )
}


def alone(directory: Path, example: Example) -> None:
    """Run it without tpwrap: one process a rank, each with the environment of a torchrun on a node of its own."""
    directory.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        numbers = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": 1}
        env = environment() | {name: str(value) for name, value in numbers.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "alone"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (directory / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    example.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory, env=env
                )
            )
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = [directory / f"rank{rank}.log" for rank in range(RANKS)]
    assert codes == [0] * RANKS, "\n".join(log.read_text(errors="replace")[-2000:] for log in logs)


def under_tpwrap(directory: Path, example: Example, faults: tuple[str, ...]) -> Run:
    directory.mkdir(parents=True, exist_ok=True)
    run_dir = directory / "run"
    launcher = [sys.executable, "-m", "tpwrap", "--nodes", str(RANKS), "--spares", "1", "--run-dir", str(run_dir)]
    launcher += [word for fault in faults for word in ("--inject", fault)]
    log = directory / "output.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*launcher, *example.command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=environment() | {MARK: str(run_dir), "OMP_NUM_THREADS": "1"},
        )
        try:
            code = process.wait(SECONDS)
        except BaseException:
            process.terminate()
            process.wait(20)
            print(log.read_text(errors="replace")[-6000:])
            raise
    return Run(code, log.read_text(errors="replace"), directory / "out", run_dir)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Example], Path]:
    """Where an example has run alone, once for all test processes."""
    root = common_directory(tmp_path_factory) / "frameworks"

    def get(example: Example) -> Path:
        directory = root / example.name
        root.mkdir(exist_ok=True)
        with (root / f"{example.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (directory / "done").exists():
                alone(directory, example)
                (directory / "done").touch()
        return directory

    return get


# --- what a run leaves ----------------------------------------------------------------------------


def left(directory: Path) -> dict[str, Any]:
    """The files below directory/out, by name, as values in which the directory and the clock do not show."""
    root = directory / "out"
    found: dict[str, Any] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = str(path.relative_to(root))
        if path.suffix == ".distcp" or any(part in name for part in NOT_COMPARED):
            continue
        found[name] = _plain(_content(path), str(directory))
    for metadata in root.rglob(".metadata"):
        found[str(metadata.parent.relative_to(root))] = _plain(_checkpoint(metadata.parent), str(directory))
    return found


def _content(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return torch.load(path, weights_only=False)
    return path.read_bytes()


def _checkpoint(directory: Path) -> Any:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = directory.parent / f"{directory.name}.whole"
    dcp_to_torch_save(directory, whole)
    return torch.load(whole, weights_only=False)


def _plain(value: Any, directory: str) -> Any:
    """Something that `==` compares to the bit, keys in their order."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return (str(value.dtype), list(value.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not any(part in str(key) for part in CLOCK)}
        return [(_plain(key, directory), _plain(item, directory)) for key, item in kept.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(item, directory) for item in value]
    if hasattr(value, "tobytes"):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, str):
        return value.replace(f"{directory}/", "")
    if isinstance(value, (bytes, int, float, bool, type(None))):
        return value
    return f"{type(value).__module__}.{type(value).__qualname__}"


def difference(first: Any, second: Any, where: str = "") -> str | None:
    """Where the two differ first, in words."""
    if type(first) is not type(second):
        return f"{where}: {type(first).__name__} and {type(second).__name__}"
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return f"{where}: only in one: {sorted(first.keys() ^ second.keys())}"
        return next((d for key in first if (d := difference(first[key], second[key], f"{where}/{key}"))), None)
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return f"{where}: {len(first)} and {len(second)} items"
        pairs = enumerate(zip(first, second, strict=True))
        return next((d for number, (a, b) in pairs if (d := difference(a, b, f"{where}[{number}]"))), None)
    return None if first == second else f"{where}: {str(first)[:100]} and {str(second)[:100]}"

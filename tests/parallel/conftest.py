"""Runs of the script of this folder: under tpwrap with and without a failure, and as it is."""

from __future__ import annotations

import fcntl
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import (
    REPOSITORY,
    SECONDS,
    Run,
    common_directory,
    environment,
    tpwrap,
    undisturbed,
)
from tests.parallel import facts, pairwise, table

SCRIPT = Path(__file__).resolve().parent / "train.py"

__all__ = ["undisturbed"]


def disturbed(directory: Path, configuration: pairwise.Row, faults: list[str] | tuple[str, ...] = ()) -> Run:
    return tpwrap(directory, script(configuration), faults, **surroundings(configuration))


def script(configuration: pairwise.Row) -> list[str]:
    return [str(SCRIPT), *table.arguments(configuration)]


def surroundings(configuration: pairwise.Row) -> dict[str, Any]:
    """How many ranks, and the environment: a step that is to be redone must not fit into what is kept for replay."""
    kind = (facts.KINDS | facts.UNHEALED)[configuration["kind"]]
    small = {"TORCHPASS_REPLAY_BUDGET_MB": "0.0003"} if configuration["way"] == "redo" else {}
    return {"nodes": kind.ranks, "variables": small}


def skip_what_is_not_here(configuration: pairwise.Row) -> None:
    if configuration["loader"] == "stateful" and importlib.util.find_spec("torchdata") is None:
        pytest.skip("torchdata, which brings StatefulDataLoader, is not installed")


@pytest.fixture
def oracle(undisturbed: Callable[..., Run]) -> Callable[[pairwise.Row], Run]:
    """The undisturbed run of a configuration, made once for all test processes."""

    def get(configuration: pairwise.Row) -> Run:
        name = f"parallel-{table.slug(configuration)}"
        return undisturbed(name, script(configuration), **surroundings(configuration))

    return get


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[pairwise.Row], Path]:
    """The results of a configuration of `table.PLAIN` without tpwrap: all are made at once, for all test processes."""

    def get(configuration: pairwise.Row) -> Path:
        directory = common_directory(tmp_path_factory) / "plain"
        directory.mkdir(exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (directory / "done").exists():
                command = [sys.executable, "-m", "tests.parallel.alone", str(directory)]
                env = {**environment(), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
                ran = subprocess.run(
                    command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
                )
                assert ran.returncode == 0, ran.stdout + ran.stderr
                (directory / "done").touch()
        return directory / table.slug(configuration)

    return get

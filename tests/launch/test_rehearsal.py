"""`--rehearse` on the command line: how it is read, and what is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tpwrap.cli import run
from tpwrap.launch import rehearsal

COMMAND = [sys.executable, "train.py"]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the command line has led to: the rehearsal, the real run, or both."""
    seen: dict[str, Any] = {"rehearsal": 0}

    def rehearse(settings: Any, job: Any, command: Any, environment: Any, updates: int | None) -> int:
        seen["rehearsed"] = (list(command), updates)
        return int(seen["rehearsal"])

    def run_local(settings: Any, job: Any, command: Any, environment: Any) -> int:
        seen["ran"] = (command.argv[1:], job.world_size)
        return 5

    monkeypatch.setattr("tpwrap.launch.rehearsal.rehearse", rehearse)
    monkeypatch.setattr("tpwrap.launch.local.run_local", run_local)
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text("")
    return seen


def tpwrap(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(run, list(arguments))
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("options", "command", "rehearsed", "ran"),
    [
        (["--nodes", "2"], COMMAND, None, True),
        (["--nodes", "2", "--rehearse"], COMMAND, (COMMAND, None), True),
        (["--rehearse", "--nodes", "2"], COMMAND, (COMMAND, None), True),
        (["--no-warm", "--rehearse", "--nodes=2"], COMMAND, (COMMAND, None), True),
        (["--nodes", "2", "--rehearse=only"], COMMAND, (COMMAND, None), False),
        (["--nodes", "2", "--rehearse=only", "--rehearse-steps", "9"], COMMAND, (COMMAND, 9), False),
        (["--nodes", "2"], [*COMMAND, "--rehearse", "x"], None, True),
        (["--nodes", "2", "--rehearse"], [*COMMAND, "--rehearse"], ([*COMMAND, "--rehearse"], None), True),
    ],
)
def test_the_command_line(
    options: list[str], command: list[str], rehearsed: object, ran: bool, called: dict[str, Any]
) -> None:
    code, _ = tpwrap(*options, *command)
    assert called.get("rehearsed") == rehearsed
    assert called.get("ran") == ((command[1:], 2) if ran else None)
    assert code == (5 if ran else 0)


def test_what_is_not_equal_is_not_run(called: dict[str, Any]) -> None:
    called["rehearsal"] = 70
    assert tpwrap("--nodes", "2", "--rehearse", *COMMAND)[0] == 70
    assert "ran" not in called


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (["--rehearse"], {}, "--rehearse needs two ranks or more"),
        (
            ["--nodes", "2", "--rehearse", "--rehearse-steps", "4"],
            {},
            "4 is too few: the failure comes after 3 updates",
        ),
        (["--nodes", "2", "--rehearse-steps", "9"], {}, "--rehearse-steps without --rehearse"),
        (["--nodes", "2", "--rehearse"], {rehearsal.VARIABLE: "6,/tmp"}, f"{rehearsal.VARIABLE} is set"),
        (["--nodes", "2", "--rehearse=perhaps"], {}, "'perhaps' is not one of 'run', 'only'"),
    ],
)
def test_what_is_refused(
    options: list[str], environment: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, text = tpwrap(*options, *COMMAND)
    assert code == 2
    assert words in text


def test_under_slurm_it_is_refused(called: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    step = {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }  # fmt: skip
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    code, text = tpwrap("--rehearse", *COMMAND)
    assert code == 2
    assert "--rehearse works on one machine" in text
    assert "rehearsed" not in called


def test_help_teaches_it() -> None:
    _, text = tpwrap("--help")
    for word in ("--rehearse", "--rehearse=only", "--strict", "NOT protected"):
        assert word in text

"""How a command is started: forked, executed, or refused with words that help."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tpwrap.core.config import ConfigError
from tpwrap.launch.command import check_other_python, recognise

OURS = "/env/bin/python"


def look(*argv: str) -> tuple[list[str], list[str] | None]:
    found = recognise(
        argv,
        executable=OURS,
        which={"python": OURS, "python3": "/env/bin/python3", "bash": "/bin/bash", OURS: OURS}.get,
        is_file=lambda name: name == "train.py",
    )
    return found.argv, found.python


def test_script_and_module_are_forked() -> None:
    assert look("python", "train.py", "--lr", "1") == (
        [OURS, "train.py", "--lr", "1"],
        ["train.py", "--lr", "1"],
    )
    assert look("python", "-u", "train.py")[1] == ["train.py"]
    assert look("python", "-m", "pkg.train", "-x")[1] == ["-m", "pkg.train", "-x"]
    assert look(OURS, "train.py", "-u")[1] == ["train.py", "-u"]


def test_bare_script_runs_in_our_python() -> None:
    assert look("train.py", "a") == ([OURS, "train.py", "a"], ["train.py", "a"])


def test_the_rest_is_executed() -> None:
    assert look("bash", "run.sh") == (["/bin/bash", "run.sh"], None)
    assert look("python3", "train.py")[1] is None  # another file: perhaps another interpreter
    assert look("python", "-O", "train.py")[1] is None
    assert look("python", "-X", "dev", "train.py")[1] is None
    assert look("python", "-c", "pass")[1] is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nonsense"], "no such program"),
        (["python", "missing.py"], "cannot open 'missing.py'"),
        (["missing.py"], "cannot open 'missing.py'"),
        (["python"], "without a script"),
        (["python", "-m"], "without a module"),
        (["python", "-I", "train.py"], "-I hides"),
        (["python", "-uE", "train.py"], "-E hides"),
    ],
)
def test_what_cannot_work_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        look(*argv)


def test_real_interpreter_is_recognised(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert recognise([sys.executable, str(script)]).python == [str(script)]


def test_other_python_without_torch_is_told(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    script = tmp_path / "train.py"
    script.write_text("")
    command = recognise([str(other), str(script)])
    assert command.python is None
    with pytest.raises(ConfigError, match="has no torch and tpwrap"):
        check_other_python(command)

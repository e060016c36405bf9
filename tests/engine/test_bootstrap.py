"""What a worker tells about the error that its script ended with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tpwrap.control.messages import Failed
from tpwrap.engine import bootstrap


def report_of(script: str, directory: Path) -> tuple[int, Failed]:
    path = directory / "train.py"
    path.write_text(script)
    sent: list[Failed] = []
    code = bootstrap._run_script(SimpleNamespace(step=3, send=sent.append), [str(path)])
    assert len(sent) == 1
    return code, msgspec.msgpack.decode(msgspec.msgpack.encode(sent[0]), type=Failed)  # as over the socket


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("def f():\n    1 / 0\nf()\n", "ZeroDivisionError: division by zero"),
        ("def f(:\n", "SyntaxError: invalid syntax (train.py, line 1)"),
        ("raise ValueError('first\\nsecond')\n", "ValueError: first"),
        ("assert False\n", "AssertionError"),
        ("raise FileNotFoundError('a\\udcff.png')\n", "FileNotFoundError: a\\udcff.png"),
        (
            "class Odd(Exception):\n    def __str__(self):\n        return 1 / 0\nraise Odd\n",
            "Odd: (its message cannot be shown)",
        ),
    ],
)
def test_the_error_is_reported_with_the_scripts_own_frames(
    script: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", list(sys.path))
    code, failed = report_of(script, tmp_path)
    assert code == 1
    assert failed.error == error
    assert "train.py" in failed.traceback
    assert "bootstrap.py" not in failed.traceback
    assert "runpy" not in failed.traceback

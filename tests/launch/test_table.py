"""`torchpass events`: the story of a run as a table, and one line where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tpwrap.cli import operate
from tpwrap.core import events
from tpwrap.report import story

STARTED = events.JobStarted(1, "r", 2, 1, 1, "node", 10.0, "h:1", [])


def write(run_dir: Path, *lines: bytes) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))


def show(run_dir: Path) -> tuple[int, str]:
    result = CliRunner().invoke(operate, ["events", str(run_dir)])
    return result.exit_code, result.output


def test_events_are_shown_and_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    notice = events.to_line(events.Notice("warning", "look here"), 101.5)
    write(tmp_path, events.to_line(STARTED, 100.0), notice, notice[:20])
    code, text = show(tmp_path)
    assert code == 0
    assert "look here" in text
    assert "1.500" in text


def test_what_is_protected_is_a_block_of_lines(tmp_path: Path) -> None:
    block = events.Protection(0, 1, ["train.py as it is: nothing", "NOT protected: x: do y"], [])
    write(tmp_path, events.to_line(STARTED, 100.0), events.to_line(block, 101.0))
    code, text = show(tmp_path)
    assert code == 0
    assert "protection" in text
    for line in block.lines:
        assert line in " ".join(text.split())
    assert story.line(block) == "\n".join(block.lines)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (None, "has no events.jsonl, so it is not the directory of a run"),
        ((), "holds no events yet"),
        ((events.to_line(STARTED, 1.0), b'{"time":1,"kind":"later_invention"}\n'), "events.jsonl:2 is no event"),
        ((b"\xff\xfe\n",), "events.jsonl:1 is no event"),
    ],
    ids=["missing", "empty", "unknown", "binary"],
)
def test_what_cannot_be_shown_is_said_in_one_line(lines: tuple[bytes, ...] | None, words: str, tmp_path: Path) -> None:
    if lines is not None:
        write(tmp_path, *lines)
    code, text = show(tmp_path)
    assert code == 2
    assert text.startswith("torchpass: ")
    assert words in text
    assert text.count("\n") == 1
    assert "Errno" not in text


def test_a_directory_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    code, text = show(tmp_path)
    assert (code, text.count("\n")) == (2, 1)
    assert "Is a directory" in text
    assert "Errno" not in text

"""Comparing two runs: what counts as equal, and how the first difference is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tpwrap.cli import operate
from tpwrap.report.compare import ResultError, compare, read, records


def line(step: int, loss: float = 1.0) -> str:
    return json.dumps({"step": step, "loss": (loss / step).hex(), "samples": f"s{step}"}) + "\n"


def results(path: Path, ranks: int = 2, steps: int = 3, weights: str = "abc") -> Path:
    path.mkdir()
    for rank in range(ranks):
        (path / f"rank{rank}.jsonl").write_text("".join(line(step) for step in range(1, steps + 1)))
        final = {"weights": weights, "pid": rank + hash(str(path)) % 1000, "objects": "ok"}
        (path / f"final{rank}.json").write_text(json.dumps(final))
    return path


def test_equal(tmp_path: Path) -> None:
    assert compare(results(tmp_path / "a"), results(tmp_path / "b")) is None


def test_one_final_file_for_all(tmp_path: Path) -> None:
    for name in "ab":
        path = results(tmp_path / name)
        for rank in range(2):
            (path / f"final{rank}.json").unlink()
        (path / "final.json").write_text('{"weights": "abc"}')
    assert compare(tmp_path / "a", tmp_path / "b") is None


def test_first_difference_is_named(tmp_path: Path) -> None:
    a, b = results(tmp_path / "a"), results(tmp_path / "b")
    (b / "rank1.jsonl").write_text(line(1) + line(2, 5.0) + line(3, 5.0))
    assert compare(a, b) == f"rank 1, step 2, loss: {(0.5).hex()!r} and {(2.5).hex()!r}"


def test_weights_steps_and_ranks_count(tmp_path: Path) -> None:
    a = results(tmp_path / "a")
    assert compare(a, results(tmp_path / "b", weights="abd")) == "final0.json, weights: 'abc' and 'abd'"
    assert compare(a, results(tmp_path / "c", steps=4)) == "number of steps: 3 and 4"
    assert compare(a, results(tmp_path / "d", ranks=3)) == "number of ranks: 2 and 3"


def test_newcomer_may_repeat_the_last_line() -> None:
    assert sorted(records(line(1) + line(2) + line(2) + line(3), "x")) == [1, 2, 3]


def test_newcomer_may_not_repeat_it_differently() -> None:
    with pytest.raises(ResultError, match="x:3: step 2 was written twice, with different loss"):
        records(line(1) + line(2) + line(2, 7.0), "x")


def test_cut_line_does_not_count() -> None:
    assert sorted(records(line(1) + line(2)[:20] + line(2), "x")) == [1, 2]
    assert sorted(records(line(1) + line(2)[:20], "x")) == [1]
    with pytest.raises(ResultError, match="x:2: not a record"):
        records(line(1) + line(2)[:20] + "\n" + line(3), "x")


def test_incomplete_directories(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="No such file"):
        read(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResultError, match="holds no rank"):
        read(tmp_path / "empty")
    a = results(tmp_path / "a")
    (a / "rank0.jsonl").write_text(line(1) + line(3))
    with pytest.raises(ResultError, match="rank 0 has no line for step 2"):
        read(a)
    b = results(tmp_path / "b", ranks=3)
    (b / "rank1.jsonl").unlink()
    with pytest.raises(ResultError, match="one is missing"):
        read(b)
    c = results(tmp_path / "c")
    (c / "final1.json").unlink()
    with pytest.raises(ResultError, match="has 2 ranks, but only final0"):
        read(c)


def test_exit_codes(tmp_path: Path) -> None:
    a, b = str(results(tmp_path / "a")), str(results(tmp_path / "b", weights="x"))
    equal = CliRunner().invoke(operate, ["compare", a, a])
    assert (equal.exit_code, equal.output) == (0, "equal: 2 ranks, 3 steps, and the final state\n")
    different = CliRunner().invoke(operate, ["compare", a, b])
    assert different.exit_code == 1
    assert different.output.startswith("different: final0.json, weights")
    assert CliRunner().invoke(operate, ["compare", a, str(tmp_path / "none")]).exit_code == 2

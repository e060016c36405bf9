"""Two traces and what differs between them, in words."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpwrap.report import traces
from tpwrap.report.traces import ResultError, Steps, advice, compare, read

RANKS, UPDATES, FAILURE = 2, 6, 3
Traces = dict[int, Steps]


def record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "session": True,
        "batch": [f"tensor a{step}", f"tensor b{step}"],
        "random": {"python": "bytes 0", "torch": f"bytes {step}"},
        "values": {"counter": str(step)},
        "loss": [f"{step}.5", f"{step}.25"],
        "scalars": {"groups 0 lr": "0.1"},
        "state": {"model/weight": f"d{step}", "optimizer/0.0/exp_avg": f"e{step}"},
    }


def made() -> Traces:
    return {rank: {step: record(step) for step in range(1, UPDATES + 1)} for rank in range(RANKS)}


def changed(change: Callable[[Traces], Any]) -> Traces:
    other = copy.deepcopy(made())
    change(other)
    return other


def first(change: Callable[[Traces], Any]) -> str:
    return str(compare(made(), changed(change), RANKS, FAILURE).difference)


def test_equal() -> None:
    assert compare(made(), made(), RANKS, FAILURE) == (None, UPDATES, [])


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("batch", 1), "tensor x", "batch 2: tensor b4 and tensor x"),
        (("batch",), ["tensor a4"], "batch 2: tensor b4 and nothing"),
        (("random", "torch"), "bytes x", "random state of torch: bytes 4 and bytes x"),
        (("values", "counter"), "1", "variable `counter`: 4 and 1"),
        (("values",), {}, "variable `counter`: 4 and nothing"),
        (("values", "more"), "9", "variable `more`: nothing and 9"),
        (("loss", 0), "4.75", "loss 1: 4.5 and 4.75"),
        (("scalars", "groups 0 lr"), "0.2", "setting `groups 0 lr` of optimizer or schedule: 0.1 and 0.2"),
        (("state", "model/weight"), "x", "tensor model/weight: d4 and x"),
    ],
)
def test_each_kind_is_named(place: tuple[Any, ...], value: Any, words: str) -> None:
    def change(trace: Traces) -> None:
        at: Any = trace[1][4]
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = value

    assert first(change) == f"step 4, rank 1: {words}"


def test_one_loss_has_no_number() -> None:
    ours, theirs = made(), made()
    ours[0][5]["loss"], theirs[0][5]["loss"] = ["1.0"], ["2.0"]
    assert str(compare(ours, theirs, RANKS, FAILURE).difference) == "step 5, rank 0: loss: 1.0 and 2.0"


def test_the_cause_comes_before_its_effects_and_earlier_steps_before_later_ones() -> None:
    def change(trace: Traces) -> None:
        trace[0][4]["state"]["model/weight"] = "x"
        trace[0][4]["loss"][0] = "x"
        trace[1][4]["batch"][0] = "x"
        trace[0][5]["batch"][0] = "x"

    assert first(change) == "step 4, rank 1: batch 1: tensor a4 and x"


@pytest.mark.parametrize("change", [lambda t: t[1].pop(5), lambda t: t.pop(1), lambda t: t.clear()])
def test_a_run_that_stops_early(change: Callable[[Traces], Any]) -> None:
    difference = compare(made(), changed(change), RANKS, FAILURE).difference
    assert difference is not None
    assert difference.kind == "missing"
    assert "the run with a failure did not get there" in str(difference)
    back = compare(changed(lambda t: t[1].pop(5)), made(), RANKS, FAILURE).difference
    assert "the undisturbed run did not get there" in str(back)


def test_what_differs_before_the_failure_by_itself_is_left_out_and_told() -> None:
    def change(trace: Traces) -> None:
        for steps in trace.values():
            for step in steps.values():
                step["values"]["started"] = "12:31"
                step["random"]["python"] = "bytes x"

    result = compare(made(), changed(change), RANKS, FAILURE)
    assert result == (None, UPDATES, ["random state of python", "variable `started`"])


def test_a_variable_that_differs_only_after_the_failure_is_not_left_out() -> None:
    assert first(lambda t: t[0][5]["values"].update(counter="x")) == "step 5, rank 0: variable `counter`: 5 and x"


def test_advice() -> None:
    before = compare(made(), changed(lambda t: t[0][2]["loss"].__setitem__(0, "x")), RANKS, FAILURE).difference
    after = compare(made(), changed(lambda t: t[0][4]["loss"].__setitem__(0, "x")), RANKS, FAILURE).difference
    assert before is not None
    assert after is not None
    assert "Seed every random generator" in advice(before, FAILURE)
    assert "tp.register(name, get, set)" in advice(after, FAILURE)
    assert "use the two lines" in advice(after, FAILURE, session=False).lower()
    for kind in ("batch", "random", "values", "loss", "scalars", "state", "missing"):
        for session in (True, False):
            assert advice(after._replace(kind=kind), FAILURE, session)


def test_reading(tmp_path: Path) -> None:
    lines = [json.dumps(record(step)) for step in (1, 2)]
    (tmp_path / "rank0.jsonl").write_text("\n".join([*lines, lines[1]]) + "\n")
    (tmp_path / "files0").mkdir()
    found = read(tmp_path)
    assert found == {0: {1: record(1), 2: record(2)}}
    assert traces.has_session(found)
    twice = {**record(2), "loss": ["x"]}
    (tmp_path / "rank0.jsonl").write_text("\n".join([*lines, json.dumps(twice)]) + "\n")
    with pytest.raises(ResultError, match="rank 0:3: step 2 was written twice, with different loss"):
        read(tmp_path)

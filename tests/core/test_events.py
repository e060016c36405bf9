from __future__ import annotations

import json

import msgspec
import pytest

from tpwrap.core import events, lint

FINISHED = events.FailoverFinished(
    generation=3,
    ranks=[1],
    moves=[events.Move(1, 1, 4, False)],
    step=20,
    stages={"detect": 0.004, "release": 0.01, "decide": 0.0, "restore": 0.1, "resume": 0.02},
    timings={"rebuild": 0.05},
    seconds=0.134,
    replayed=7,
    reason="node 1 is lost",
)


@pytest.mark.parametrize(
    "event",
    [
        events.JobStarted(1, "r", 4, 1, 1, "node", 10.0, "h:1", ["x"]),
        events.NodeJoined(0, "h", 2, 1, "n1"),
        events.Arranged([0, 1], [2], "reason"),
        events.WorkerAssigned(0, 0, 0, "n0s0w0", 33, 0, 0),
        events.RankFailed(0, 0, 0, "n0s0w0", "signal 9", 20, 0),
        events.NodeDown(1, "gone", [1]),
        events.SpareLost(4, "gone", 0),
        events.FailoverStarted(1, [1], "x"),
        FINISHED,
        events.Notice("warning", "ü\n", 1),
        events.Protection(0, 1, ["a", "b"], [lint.Finding("unprotected", "x", "y", "train.py:3", "z")]),
        events.Ruled([[0, 2], [1]], True, "2 shards"),
        events.FaultInjected("rank=1 …", 1, 1),
        events.JobEnded(0, "done", "", 30, 1),
    ],
)
def test_lines(event: events.Event) -> None:
    line = events.to_line(event, 1700000000.25)
    assert line.count(b"\n") == 1
    plain = json.loads(line)
    assert plain["time"] == 1700000000.25
    assert list(plain)[:2] == ["time", "kind"]
    assert events.from_line(line) == (1700000000.25, event)


def test_kinds() -> None:
    assert json.loads(events.to_line(FINISHED, 0))["kind"] == "failover_finished"


def test_timeline_adds_up() -> None:
    marks = (("detect", 0.0), ("release", 1.0), ("decide", 3.0), ("restore", 3.0), ("release", 7.0))
    stages = events.timeline(marks, 8.0)
    assert stages == {"detect": 1.0, "release": 3.0, "decide": 0.0, "restore": 4.0, "resume": 0.0}
    assert sum(stages.values()) == 8.0
    assert set(events.timeline((), 1.0).values()) == {0.0}


def test_slowest() -> None:
    assert events.slowest([{"a": 1.0, "b": 5.0}, {"a": 2.0}, {}]) == {"a": 2.0, "b": 5.0}


def test_render() -> None:
    assert events.render(FINISHED) == (
        "rank 1 replaced at step 20 in 134 ms: detect 4 ms  release 10 ms  decide 0 ms  restore 100 ms  resume 20 ms"
    )
    assert "at step 20 by redo in" in events.render(msgspec.structs.replace(FINISHED, way="redo"))


def test_a_failover_told_before_there_were_two_ways() -> None:
    line = events.to_line(FINISHED, 1.0)
    assert events.from_line(line.replace(b',"way":"replay"', b"")) == (1.0, FINISHED)

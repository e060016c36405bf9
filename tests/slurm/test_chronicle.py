from __future__ import annotations

import msgspec

from tpwrap.core import events
from tpwrap.slurm.chronicle import SETTLE, Chronicle, Drain

NAMES = {i: f"n{i + 1}" for i in range(5)}
STARTED = events.JobStarted(1, "r", 3, 2, 2, "node", 10.0, "h:1", [])
ARRANGED = events.Arranged([1, 2, 3], [0, 4], "why")


def moved(source: int, target: int, *ranks: int) -> events.FailoverFinished:
    moves = [events.Move(rank, source, target, source == target) for rank in ranks]
    return events.FailoverFinished(1, list(ranks), moves, 57, {}, {}, 1.26, 3, "reason")


def chronicle(*told: events.Event, own: str = "") -> Chronicle:
    story = Chronicle(NAMES, own)
    for event in (STARTED, ARRANGED, *told):
        story.note(event, 1000.0)
    return story


def lost_node() -> list[events.Event]:
    return [
        events.NodeDown(2, "its supervisor was silent for 3.0 s", [2, 3]),
        events.RankFailed(2, 2, 0, "w", "its supervisor was silent for 3.0 s", 56, 0),
        events.RankFailed(3, 2, 1, "w", "its supervisor was silent for 3.0 s", 55, 0),
    ]


def test_a_quiet_job() -> None:
    assert chronicle(own="mine").comment() == "mine | torchpass: ranks=6 spares=2/2 failovers=0"


def test_a_lost_node_is_drained_with_cause_and_step() -> None:
    story = chronicle(*lost_node(), moved(2, 4, 2, 3))
    assert story.due(1000.0) == []
    assert story.waits()
    assert story.due(1000.0 + SETTLE) == [Drain("n3", "its supervisor was silent for 3.0 s step 57")]
    assert story.due(2000.0) == []
    assert "ranks=6 spares=1/2 failovers=1; " in story.comment()
    assert "n3->n5 ranks 2,3 step 57 1.3s: its supervisor was silent for 3.0 s" in story.comment()


def test_a_step_that_ran_once_more() -> None:
    redone = msgspec.structs.replace(moved(2, 4, 2, 3), way="redo")
    assert "n3->n5 ranks 2,3 step 57 redo 1.3s: " in chronicle(*lost_node(), redone).comment()


def test_a_rank_healed_in_its_slot_drains_nothing() -> None:
    story = chronicle(events.RankFailed(1, 1, 1, "w", "killed by SIGKILL", 3, 0), moved(1, 1, 1))
    assert story.due(9999.0) == []
    assert "spares=2/2 failovers=1; " in story.comment()
    assert "rank 1 healed on n2 step 57 1.3s: killed by SIGKILL" in story.comment()


def test_a_rehearsed_failure_drains_nothing() -> None:
    injected = events.FaultInjected("node=2 step=5 phase=backward kill", 2, 2)
    story = chronicle(injected, *lost_node(), moved(2, 4, 2, 3))
    assert story.due(9999.0) == []
    assert "(rehearsal)" in story.comment()


def test_a_job_that_is_cancelled_drains_nothing() -> None:
    story = chronicle(*lost_node(), events.JobEnded(143, "stopped by SIGTERM", "", 5, 0))
    assert story.due(9999.0) == []
    assert "ended with code 143: stopped by SIGTERM" in story.comment()
    assert story.ended


def test_a_lost_spare() -> None:
    story = chronicle(events.SpareLost(4, "gone", 1))
    assert [drain.node for drain in story.due(9999.0)] == ["n5"]
    assert "spares=1/2" in story.comment()
    assert "spare n5 lost: gone" in story.comment()

from __future__ import annotations

import pytest

from tpwrap.control.messages import Ready, Released
from tpwrap.core.commit import Impossible, choose, divided, verify

ALL_ALIKE = dict.fromkeys(range(6), "s")
TWO_SHARDS: dict[int, str | None] = {0: "a", 1: "b", 2: "a", 3: "b"}


def report(step: int, digest: str, layout: str = "") -> Ready:
    return Ready(1, step, digest, layout, {})


def at(step: int, voted: bool = False, replay_from: int = -1) -> Released:
    return Released(1, step, 0.0, voted, replay_from)


# --- without votes ---------------------------------------------------------------------------------


def test_the_least_advanced_survivor_decides() -> None:
    entry = choose({0: at(8), 2: at(7), 3: at(7)}, votes=False)
    assert (entry.step, entry.holders, entry.forward, entry.way) == (7, [2, 3], [], "replay")
    assert (
        entry.reason == "ranks 2, 3 hold step 7; rank 0 already applied the next update and will serve it from the log"
    )
    assert choose({5: at(0)}, votes=False).reason == "rank 5 holds step 0"


def test_in_set_up_nobody_holds_anything() -> None:
    for votes in (False, True):
        entry = choose({0: at(-1), 1: at(-1)}, votes)
        assert (entry.step, entry.holders, entry.way) == (-1, [], "replay")
        entry = choose({}, votes)
        assert (entry.step, entry.holders, entry.way) == (-1, [], "replay")


def test_where_one_knows_that_set_up_is_over_all_are_at_step_0() -> None:
    assert (choose({0: at(-1), 1: at(0)}, False).step, choose({0: at(-1), 1: at(0)}, False).holders) == (0, [0, 1])
    assert (choose({0: at(-1), 1: at(1)}, False).step, choose({0: at(-1), 1: at(1)}, False).holders) == (0, [0])
    assert choose({0: at(-1), 1: at(-1)}, False, floor=0).step == 0


def test_nobody_goes_back() -> None:
    with pytest.raises(Impossible, match="from 5 to 3"):
        choose({0: at(3)}, votes=False, floor=5)


# --- with votes ------------------------------------------------------------------------------------


def test_whoever_has_passed_the_vote_takes_the_others_along() -> None:
    for first in (at(8), at(7, voted=True)):
        entry = choose({0: first, 2: at(7), 3: at(7, voted=True)}, votes=True)
        assert (entry.step, entry.holders) == (8, [0, 2, 3])
        assert 2 in entry.forward
    assert entry.reason == (
        "ranks 0, 2, 3 roll forward to step 8; that update was voted for: all ranks hold valid gradients"
    )


def test_where_nobody_has_passed_it_all_stay() -> None:
    entry = choose({0: at(7), 2: at(7)}, votes=True)
    assert (entry.step, entry.holders, entry.forward, entry.reason) == (7, [0, 2], [], "ranks 0, 2 hold step 7")


def test_the_first_update() -> None:
    assert choose({0: at(0), 1: at(0)}, votes=True).step == 0
    assert choose({0: at(1), 1: at(-1)}, votes=True).forward == [1]
    # It does not know that everybody's set-up is over, but nobody votes before it is.
    assert (choose({0: at(-1, voted=True), 1: at(-1)}, votes=True)).step == 1


def test_what_a_plan_has_decided_once_holds_for_those_that_it_did_not_reach() -> None:
    """Rank 0 had passed the vote, so a plan told rank 1 to roll forward, but rank 0 died before rank 1 heard that."""
    entry = choose({1: at(7)}, votes=True, floor=8)
    assert (entry.step, entry.forward) == (8, [1])


def test_two_updates_apart_is_impossible_where_all_vote() -> None:
    with pytest.raises(Impossible, match="rank 1 is at step 6, though all have voted for update 8"):
        choose({0: at(8), 1: at(6)}, votes=True)


# --- replay or redo --------------------------------------------------------------------------------


def test_replay_where_every_log_reaches_back() -> None:
    assert choose({0: at(7, replay_from=7), 1: at(8, replay_from=7)}, False).way == "replay"
    assert choose({0: at(7, replay_from=7), 1: at(7, replay_from=3)}, True, redo=[0, 1]).way == "replay"
    # Its log of step 7 is cut, but it rolls forward.
    assert choose({0: at(8, replay_from=8), 1: at(7, replay_from=8)}, True).way == "replay"


def test_redo_where_one_does_not_and_all_survivors_can() -> None:
    cut = {0: at(7, replay_from=8), 1: at(7)}
    entry = choose(cut, True, redo=[0, 1, 2])
    assert entry.way == "redo"
    assert entry.reason == "ranks 0, 1 hold step 7; rank 0 did not keep the collectives of the step: all redo it"
    assert choose(cut, True, redo=[1]).way is None
    assert choose(cut, True, redo=[0]).way is None
    assert choose(cut, True).stuck == [0]


def test_set_up_cannot_be_redone() -> None:
    assert choose({0: at(-1, replay_from=-1)}, True, redo=[0]).way == "replay"
    assert choose({0: at(-1, replay_from=0)}, True, redo=[0]).way is None
    assert choose({0: at(0, replay_from=1)}, True, redo=[0]).way == "redo"


def test_one_ahead_cannot_serve_what_it_did_not_keep() -> None:
    entry = choose({0: at(8, replay_from=8), 1: at(7, replay_from=7)}, votes=False)
    assert (entry.way, entry.stuck) == (None, [0])


# --- do they agree? ----------------------------------------------------------------------------------


def test_equal_digests_agree_step_by_step() -> None:
    assert verify({0: report(7, "a"), 1: report(7, "a"), 2: report(8, "b"), 3: report(8, "b")}, ALL_ALIKE).agree
    assert verify({0: report(7, ""), 1: report(7, "a")}, ALL_ALIKE).agree
    assert "1 of 2" in verify({0: report(7, ""), 1: report(7, "a")}, ALL_ALIKE).reason


def test_a_difference_names_the_ranks() -> None:
    verdict = verify({0: report(7, "a" * 40), 1: report(7, "b" * 40), 2: report(7, "a" * 40)}, ALL_ALIKE)
    assert not verdict.agree
    assert "after update 7: ranks 0, 2 have aaaaaaaaaaaa, rank 1 has bbbbbbbbbbbb" in verdict.reason
    assert not verify({0: report(7, "a"), 1: report(8, "b"), 2: report(8, "c")}, ALL_ALIKE).agree


def test_layouts() -> None:
    assert verify({0: report(7, "a", "L"), 1: report(7, "a", ""), 2: report(8, "b", "L")}, ALL_ALIKE).agree
    verdict = verify({0: report(7, "a", "L"), 1: report(7, "a", "M")}, ALL_ALIKE)
    assert not verdict.agree
    assert "gradient buckets" in verdict.reason


def test_only_replicas_are_compared() -> None:
    ready = {0: report(7, "a", "L"), 1: report(7, "b", "M"), 2: report(7, "a", "L"), 3: report(7, "b", "M")}
    assert verify(ready, TWO_SHARDS).agree
    assert "rank 1 has b, rank 3 has x" in verify({**ready, 3: report(7, "x", "M")}, TWO_SHARDS).reason
    assert "buckets" in verify({**ready, 2: report(7, "a", "M")}, TWO_SHARDS).reason
    assert verify({**ready, 3: report(7, "x", "M")}, {**TWO_SHARDS, 3: None}).agree  # whose replica is not known
    assert not verify({**ready, 3: report(7, "x", "M")}, {**dict.fromkeys(range(3), "a"), 3: None}).agree


def test_where_all_vote_all_are_at_the_same_step() -> None:
    ready = {0: report(8, "a"), 1: report(7, "b")}
    assert verify(ready, ALL_ALIKE).agree
    assert verify(ready, ALL_ALIKE, at=8).reason == "rank 1 did not come to step 8"
    assert not verify({0: report(0, "a")}, ALL_ALIKE, at=1).agree


def test_the_first_replicas_that_differ() -> None:
    assert divided({0: "x", 1: "y", 2: "x", 3: "y"}, TWO_SHARDS) == []
    assert divided({0: "x", 1: "y", 2: "z", 3: "y"}, TWO_SHARDS) == [0, 2]
    assert divided({1: "y", 3: ""}, TWO_SHARDS) == []
    verdict = verify({0: report(7, "x"), 1: report(8, "y"), 3: report(8, "z")}, TWO_SHARDS)
    assert (verdict.step, verdict.apart) == (8, [1, 3])

from __future__ import annotations

from tpwrap.control.messages import Ready
from tpwrap.core.commit import choose, verify


def report(step: int, digest: str, layout: str = "") -> Ready:
    return Ready(1, step, digest, layout, {})


def test_the_least_advanced_survivor_decides() -> None:
    entry = choose({0: 8, 2: 7, 3: 7})
    assert (entry.step, entry.sources) == (7, [2, 3])
    assert (
        entry.reason == "ranks 2, 3 hold step 7; rank 0 already applied the next update and will serve it from the log"
    )
    assert choose({5: 0}).reason == "rank 5 holds step 0"


def test_in_set_up_there_are_no_sources() -> None:
    assert (choose({0: -1, 1: -1}).step, choose({0: -1, 1: -1}).sources) == (-1, [])
    assert (choose({}).step, choose({}).sources) == (-1, [])


def test_where_one_knows_that_set_up_is_over_all_are_at_step_0() -> None:
    assert (choose({0: -1, 1: 0}).step, choose({0: -1, 1: 0}).sources) == (0, [0, 1])
    assert (choose({0: -1, 1: 1}).step, choose({0: -1, 1: 1}).sources) == (0, [0])
    assert choose({0: -1, 1: -1}, floor=0).step == 0
    assert choose({0: 3}, floor=5).step == 3  # for the caller to refuse


def test_equal_digests_agree_step_by_step() -> None:
    assert verify({0: report(7, "a"), 1: report(7, "a"), 2: report(8, "b"), 3: report(8, "b")}).agree
    assert verify({0: report(7, ""), 1: report(7, "a")}).agree
    assert "1 of 2" in verify({0: report(7, ""), 1: report(7, "a")}).reason


def test_a_difference_names_the_ranks() -> None:
    verdict = verify({0: report(7, "a" * 40), 1: report(7, "b" * 40), 2: report(7, "a" * 40)})
    assert not verdict.agree
    assert "after update 7: ranks 0, 2 have aaaaaaaaaaaa, rank 1 has bbbbbbbbbbbb" in verdict.reason
    assert not verify({0: report(7, "a"), 1: report(8, "b"), 2: report(8, "c")}).agree


def test_layouts() -> None:
    assert verify({0: report(7, "a", "L"), 1: report(7, "a", ""), 2: report(8, "b", "L")}).agree
    verdict = verify({0: report(7, "a", "L"), 1: report(7, "a", "M")})
    assert not verdict.agree
    assert "gradient buckets" in verdict.reason

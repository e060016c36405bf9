from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tpwrap.core.job import Job
from tpwrap.core.placement import LostRank, Placed, Unplaceable, buddies, choose, initial


def lost(rank: int, node: int, slot: int = 0, kind: str = "node", strikes: int = 1) -> LostRank:
    return LostRank(rank, (node, slot), kind, "cause", strikes)  # type: ignore[arg-type]


def test_initial() -> None:
    assert initial(Job(nodes=2, nproc_per_node=2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_two_lost_nodes_get_one_node_each() -> None:
    group = [lost(2, 1, 0), lost(3, 1, 1), lost(0, 0, 0), lost(1, 0, 1)]
    choice = choose(group, {4: [0, 1], 5: [0, 1]}, "node", 2)
    assert isinstance(choice, Placed)
    assert choice.places == {0: (4, 0), 1: (4, 1), 2: (5, 0), 3: (5, 1)}
    assert choice.reason.startswith("node 0 is lost (cause): ranks 0, 1 move to spare node 4")


def test_a_spare_node_that_is_too_small_is_passed_over() -> None:
    choice = choose([lost(0, 0, 0), lost(1, 0, 1)], {4: [1], 5: [0, 1]}, "node", 2)
    assert isinstance(choice, Placed)
    assert choice.places == {0: (5, 0), 1: (5, 1)}


def test_unit_rank_spreads_where_no_node_is_large_enough() -> None:
    group = [lost(0, 0, 0), lost(1, 0, 1)]
    choice = choose(group, {4: [1], 5: [0]}, "rank", 2)
    assert isinstance(choice, Placed)
    assert choice.places == {0: (4, 1), 1: (5, 0)}
    refused = choose(group, {4: [1], 5: [0]}, "node", 2)
    assert isinstance(refused, Unplaceable)
    assert "with unit = rank" in refused.reason
    assert not refused.repeated


def test_a_process_comes_back_in_its_own_slot_and_a_repetition_moves() -> None:
    first = choose([lost(3, 1, 0, "process")], {4: [0]}, "node", 1)
    assert isinstance(first, Placed)
    assert first.places == {3: (1, 0)}
    assert not first.given_up
    second = choose([lost(3, 1, 0, "process", 2)], {4: [0, 1], 5: [1]}, "node", 2)
    assert isinstance(second, Placed)
    assert second.places == {3: (5, 1)}  # the node that is broken into already
    assert second.given_up == {(1, 0)}
    assert isinstance(choose([lost(3, 4, 0, "process", 3)], {5: [0]}, "node", 2), Unplaceable)
    none = choose([lost(3, 1, 0, "process", 2)], {}, "node", 0)
    assert isinstance(none, Unplaceable)
    assert none.repeated
    assert "no spare at the start" in none.reason


def test_a_slot_without_workers_is_given_up_at_once() -> None:
    choice = choose([lost(3, 1, 0, "slot")], {4: [0]}, "node", 1)
    assert isinstance(choice, Placed)
    assert (choice.places, choice.given_up) == ({3: (4, 0)}, {(1, 0)})
    none = choose([lost(3, 1, 0, "slot")], {4: []}, "node", 1)
    assert isinstance(none, Unplaceable)
    assert not none.repeated


KINDS = st.sampled_from(["node", "process", "slot"])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), KINDS), unique_by=lambda t: t[:2]),
    st.dictionaries(st.integers(4, 7), st.lists(st.integers(0, 1), unique=True)),
    st.sampled_from(["node", "rank"]),
)
def test_no_slot_is_given_twice(where: list[tuple[int, int, str]], free: dict[int, list[int]], unit: str) -> None:
    group = [lost(2 * node + slot, node, slot, kind) for node, slot, kind in where]
    choice = choose(group, free, unit, 4)  # type: ignore[arg-type]
    if isinstance(choice, Placed):
        assert choice.places.keys() == {one.rank for one in group}
        assert len(set(choice.places.values())) == len(group)
        for one in group:
            node, slot = choice.places[one.rank]
            assert one.kind == "process" or slot in free[node]
    else:
        assert sum(one.kind != "process" for one in group) > 0


def test_buddies() -> None:
    assert buddies(3, [0, 1, 2, 3], [4], 1, 5) == (0,)
    assert buddies(1, [0, 1, 2, 3], [4, 5], 2, 6) == (2, 3)
    assert buddies(0, [0, 1], [2, 3], 3, 4) == (1, 2, 3)
    assert buddies(0, [0], [], 0, 1) == (0,)
    assert buddies(0, [0], [], 1, 2) == (0,)  # the other node is down


@given(st.sets(st.integers(0, 9), min_size=1), st.sets(st.integers(10, 15)), st.integers(0, 5))
def test_buddies_are_others(holding: set[int], idle: set[int], copies: int) -> None:
    for node in holding:
        chosen = buddies(node, holding, idle, copies, 16)
        if chosen != (node,):
            assert node not in chosen
            assert len(chosen) == len(set(chosen)) == min(copies, len(holding | idle) - 1)

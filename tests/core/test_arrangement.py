from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tpwrap.core import placement
from tpwrap.core.arrangement import Arrangement, Site, arrange


def blocks(*names: str) -> dict[int, Site]:
    return {node: Site(block=name) for node, name in enumerate(names)}


def test_without_topology_the_last_nodes_wait() -> None:
    assert arrange(blocks("", "", "", ""), 3) == Arrangement(
        [0, 1, 2], [3], "the first nodes train, the last ones are spares"
    )


def test_the_batch_script_runs_beside_a_spare() -> None:
    sites = {0: Site(vital="the batch script"), 1: Site(), 2: Site(), 3: Site()}
    chosen = arrange(sites, 2)
    assert (chosen.training, chosen.spares) == ([1, 2], [0, 3])
    assert "node 0 is a spare, because of the batch script there" in chosen.reason
    assert arrange(sites, 4).training == [0, 1, 2, 3]


def test_spares_are_spread_over_blocks_and_ranks_go_block_by_block() -> None:
    chosen = arrange(blocks("b", "a", "b", "a", "b", "a", "b", "a"), 6)
    assert chosen.spares == [6, 7]
    assert chosen.training == [0, 2, 4, 1, 3, 5]
    larger = arrange(blocks("a", "b", "b", "b", "b", "b"), 4)
    assert larger.spares == [4, 5]


def test_a_sick_node_holds_no_rank_unless_it_must() -> None:
    sites = {0: Site(), 1: Site(sick="Xid 79"), 2: Site(), 3: Site(vital="the batch script")}
    chosen = arrange(sites, 2)
    assert (chosen.training, chosen.spares) == ([0, 2], [1, 3])
    assert "node 1 holds no rank, because it is sick (Xid 79)" in chosen.reason
    assert "too few healthy nodes" in arrange(sites, 4).reason


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), min_size=1, max_size=12), st.data())
def test_every_node_is_placed_once(nodes: list[tuple[str, bool, bool]], data: st.DataObject) -> None:
    sites = {
        i: Site(block, "the batch script" if vital else "", "sick" if sick else "")
        for i, (block, vital, sick) in enumerate(nodes)
    }
    training = data.draw(st.integers(1, len(sites)))
    chosen = arrange(sites, training)
    assert sorted(chosen.training + chosen.spares) == sorted(sites)
    assert len(chosen.training) == training
    idle_and_healthy = [node for node in chosen.spares if not sites[node].sick]
    assert not idle_and_healthy or not any(sites[node].sick for node in chosen.training)


def test_a_lost_node_is_replaced_from_its_own_block_and_what_is_vital_comes_last() -> None:
    sites = {0: Site("a", "the batch script"), 1: Site("a"), 2: Site("b"), 3: Site("b"), 4: Site("a", sick="hot")}
    lost = [placement.LostRank(0, (1, 0), "node", "dead")]

    def taken(free: list[int]) -> int:
        choice = placement.choose(lost, {node: [0] for node in free}, "node", 2, sites)
        assert isinstance(choice, placement.Placed)
        return choice.places[0][0]

    assert taken([0, 3, 4]) == 3  # another block, but neither vital nor sick
    assert taken([0, 4]) == 0
    lost = [placement.LostRank(0, (2, 0), "node", "dead")]
    assert taken([1, 3]) == 3

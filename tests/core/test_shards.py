from __future__ import annotations

from tpwrap.core import shards
from tpwrap.core.shards import Shards

MESH: Shards = {0: "a", 1: "b", 2: "a", 3: "b"}


def test_replicas_hold_the_same_shard() -> None:
    assert shards.groups(MESH) == [[0, 2], [1, 3]]
    assert shards.replicas(3, MESH, [0, 1, 2]) == [1]
    assert shards.replicas(1, MESH, [0, 2]) == []


def test_without_shards_all_ranks_are_replicas() -> None:
    assert shards.groups({0: "", 1: ""}) == [[0, 1]]
    assert shards.groups({0: None, 1: None}) == [[0, 1]]


def test_an_unknown_shard_is_compared_with_all_others_where_these_are_equal_but_not_copied() -> None:
    """Shards may have equal shapes: what was copied would look right."""
    assert shards.groups({0: "a", 1: None, 2: "a"}) == [[0, 1, 2]]
    assert shards.replicas(1, {0: "a", 1: None, 2: "a"}, [0, 2]) == []
    assert shards.replicas(1, {0: "a", 1: "a", 2: None}, [0, 2]) == [0]


def test_an_unknown_shard_is_nobodys_where_there_are_several() -> None:
    mixed = {**MESH, 3: None}
    assert shards.replicas(3, mixed, [0, 1, 2]) == []
    assert shards.replicas(1, mixed, [0, 2, 3]) == []
    assert shards.replicas(0, mixed, [1, 2, 3]) == [2]
    assert shards.groups(mixed) == [[0, 2], [1], [3]]


def test_a_shard_that_nobody_holds() -> None:
    assert shards.extinct(MESH, [0, 1]) == []
    assert shards.extinct(MESH, [0, 2]) == [1, 3]
    assert shards.extinct({**MESH, 3: None}, [0, 1]) == []  # nobody knows what rank 3 held
    assert shards.extinct({0: None, 1: None}, [1]) == []


def test_the_rule() -> None:
    assert not shards.rule({0: "a", 1: "a"}, []).votes
    assert not shards.rule({0: "a", 1: None}, []).votes
    rule = shards.rule({0: "a", 1: "a"}, [1])
    assert (rule.votes, rule.shards) == (True, [[0, 1]])
    assert "rank 1 can redo a step" in rule.reason
    rule = shards.rule(MESH, [])
    assert (rule.votes, rule.shards) == (True, [[0, 2], [1, 3]])
    assert "2 shards" in rule.reason


def test_in_words() -> None:
    assert shards.describe([[0, 2], [1, 3]], True) == (
        "2 shards with 2 replicas each: ranks 0 2 | 1 3; every update waits for a vote"
    )
    assert shards.describe([[0, 2], [1]], False) == "2 shards with 1 to 2 replicas: ranks 0 2 | 1"
    assert shards.describe([[0], [1]], False) == "2 shards with 1 replica each: ranks 0 | 1"
    many = shards.describe([[n, *range(100 + 20 * n, 120 + 20 * n)] for n in range(50)], True)
    assert many.startswith("50 shards with 21 replicas each: ranks 0 100 101")
    assert "| …; every" in many
    assert len(many) < 500


def test_who_has_no_replica() -> None:
    assert shards.alone([[0, 2], [1, 3]]) == ""
    assert shards.alone([[0, 1], [3]]) == (
        "rank 3 holds a shard that no other rank has: its failure would end the job"
    )
    assert shards.alone([[0], [1]]) == (
        "ranks 0, 1 hold shards that no other rank has: the failure of one of them would end the job"
    )
    assert "and 12 others" in shards.alone([[n] for n in range(20)])

"""Where ranks run and where their sidecars are kept. Every decision comes with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tpwrap.core.arrangement import Site, closeness
from tpwrap.core.job import Job, Unit

Place: TypeAlias = tuple[int, int]
"""A slot: (node, local index)."""

LossKind: TypeAlias = Literal["process", "slot", "node"]
"""process: the worker alone; slot: the slot brings no worker up any more; node: everything on the node."""

STRIKES_FOR_SPARE = 2
"""the same rank failing at the same step this often: its slot is suspected"""
STRIKES_FOR_END = 3
"""… and this often, on two slots: the script is"""


@dataclass(frozen=True)
class LostRank:
    """A rank that needs a slot."""

    rank: int
    place: Place
    kind: LossKind
    cause: str
    strikes: int = 1
    """how often its process has failed at this step, this time included"""


@dataclass(frozen=True)
class Placed:
    places: dict[int, Place]
    given_up: frozenset[Place]
    """slots that are not to be used again"""
    reason: str


@dataclass(frozen=True)
class Unplaceable:
    rank: int
    repeated: bool
    """True: the rank kept failing (its own error says more); False: there is no slot left"""
    reason: str


def initial(job: Job, training: Sequence[int] | None = None) -> list[Place]:
    """Index = rank: node by node (those in `training`; by default the first ones), slot by slot."""
    nodes = range(job.nodes) if training is None else training
    return [(node, slot) for node in nodes for slot in range(job.nproc_per_node)]


def choose(
    lost: Sequence[LostRank],
    free: Mapping[int, Sequence[int]],
    unit: Unit,
    spares_at_start: int,
    sites: Mapping[int, Site] | None = None,
) -> Placed | Unplaceable:
    """A slot for each lost rank. free: node -> its free slots (up, holding no rank).

    The worker alone failed: it comes back in its own slot and no spare is spent. Its node failed: all its
    ranks move to one spare node, so that what belongs together stays together; to one close by if `sites` tell.
    """
    sites = sites or {}
    left = {node: sorted(slots) for node, slots in free.items() if slots}
    places: dict[int, Place] = {}
    given_up: set[Place] = set()
    reasons: list[str] = []
    for group in _by_node([one for one in lost if one.kind == "node"]):
        target = _whole_node(group, left, sites) or (_scattered(group, left, sites) if unit == "rank" else None)
        if target is None:
            return Unplaceable(group[0].rank, False, _no_room(group, left, spares_at_start, unit))
        for one in group:
            _take(left, target[one.rank])
        places.update(target)
        to = sorted({node for node, _ in target.values()})
        reasons.append(
            f"node {group[0].place[0]} is lost ({group[0].cause}): {_ranks(group)} "
            f"{'moves' if len(group) == 1 else 'move'} to spare {_nodes(to)}"
        )
    for one in sorted((one for one in lost if one.kind != "node"), key=lambda one: one.rank):
        if one.kind == "process" and one.strikes < STRIKES_FOR_SPARE:
            places[one.rank] = one.place
            reasons.append(f"rank {one.rank} is healed in its own slot: its node is up ({one.cause})")
            continue
        if one.kind == "process" and one.strikes >= STRIKES_FOR_END:
            times = f"rank {one.rank} failed {one.strikes} times at the same step, on two slots"
            return Unplaceable(one.rank, True, f"{times}: {one.cause}")
        place = _any_slot(one.place[0], left, sites)
        if place is None:
            return _no_second_slot(one, spares_at_start)
        _take(left, place)
        places[one.rank] = place
        given_up.add(one.place)
        why = "failed again at the same step" if one.kind == "process" else "has no working slot"
        reasons.append(f"rank {one.rank} {why} ({one.cause}): it moves to spare node {place[0]}")
    return Placed(places, frozenset(given_up), "; ".join(reasons))


def buddies(
    node: int, holding: Iterable[int], idle: Iterable[int], copies: int, total: int
) -> tuple[int, ...]:
    """The nodes that keep the sidecars of the ranks on `node`: the next ones in the ring.

    Nodes that hold ranks come before idle spares: when one of them is lost, a recovery follows and names
    new buddies, whereas a spare that dies idle must not disturb the training. Alone: the node itself.
    """

    def ring(nodes: Iterable[int]) -> list[int]:
        return sorted((n for n in nodes if n != node), key=lambda n: (n - node) % total)

    others = ring(holding) + ring(idle)
    return tuple(others[:copies]) or (node,)


def _by_node(lost: Sequence[LostRank]) -> list[list[LostRank]]:
    groups: dict[int, list[LostRank]] = {}
    for one in sorted(lost, key=lambda one: (one.place, one.rank)):
        groups.setdefault(one.place[0], []).append(one)
    return [groups[node] for node in sorted(groups)]


def _whole_node(
    group: Sequence[LostRank], left: Mapping[int, list[int]], sites: Mapping[int, Site]
) -> dict[int, Place] | None:
    for node in sorted(left, key=lambda node: closeness(sites, group[0].place[0], node)):
        slots = left[node]
        if len(slots) < len(group):
            continue
        own = [one.place[1] for one in group]
        if len(set(own)) == len(own) and set(own) <= set(slots):  # keep local indexes where that is possible
            return {one.rank: (node, one.place[1]) for one in group}
        return {one.rank: (node, slot) for one, slot in zip(group, slots, strict=False)}
    return None


def _scattered(
    group: Sequence[LostRank], left: Mapping[int, list[int]], sites: Mapping[int, Site]
) -> dict[int, Place] | None:
    nodes = sorted(left, key=lambda node: closeness(sites, group[0].place[0], node))
    slots = [(node, slot) for node in nodes for slot in left[node]]
    if len(slots) < len(group):
        return None
    return {one.rank: place for one, place in zip(group, slots, strict=False)}


def _any_slot(lost: int, left: Mapping[int, list[int]], sites: Mapping[int, Site]) -> Place | None:
    """From the node with the fewest free slots: whole nodes are kept for lost nodes."""
    nodes = sorted(
        (node for node in left if left[node]), key=lambda node: (len(left[node]), closeness(sites, lost, node))
    )
    return (nodes[0], left[nodes[0]][0]) if nodes else None


def _take(left: dict[int, list[int]], place: Place) -> None:
    left[place[0]].remove(place[1])


def _no_room(
    group: Sequence[LostRank], left: Mapping[int, Sequence[int]], spares_at_start: int, unit: Unit
) -> str:
    some = sum(map(len, left.values()))
    if some:
        room = f"no spare node has {len(group)} free slots ({some} left in all)"
        if unit == "node" and some >= len(group):
            room += "; with unit = rank they could be spread over several nodes"
    else:
        room = "no spare is left"
    return (
        f"node {group[0].place[0]} with {_ranks(group)} is lost ({group[0].cause}) and {room}; "
        f"the job had {_count(spares_at_start)} at the start. "
        f"Start it again from its last checkpoint, with --spares {spares_at_start + 1} or more"
    )


def _no_second_slot(one: LostRank, spares_at_start: int) -> Unplaceable:
    if one.kind == "process":
        what = f"rank {one.rank} failed {one.strikes} times at the same step"
    else:
        what = f"slot {one.place[1]} of node {one.place[0]} brings up no worker for rank {one.rank}"
    return Unplaceable(
        one.rank,
        one.kind == "process",
        f"{what} ({one.cause}) and no spare slot is left to try; the job had {_count(spares_at_start)} "
        f"at the start. If the script is not at fault, start again with --spares {spares_at_start + 1}",
    )


def _count(spares: int) -> str:
    return "no spare" if spares == 0 else "1 spare node" if spares == 1 else f"{spares} spare nodes"


def _ranks(group: Sequence[LostRank]) -> str:
    return ("rank " if len(group) == 1 else "ranks ") + ", ".join(str(one.rank) for one in group)


def _nodes(nodes: Sequence[int]) -> str:
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(map(str, nodes))

"""Which ranks are replicas of each other, and what follows from it: who can serve whom, and whether the job votes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Shards: TypeAlias = Mapping[int, str | None]
"""rank -> the name of its shard, equal for replicas; None: not known yet"""

_MOST_NAMED = 8


@dataclass(frozen=True)
class Rule:
    """Whether the job votes, and why. shards: the ranks of each."""

    votes: bool
    shards: list[list[int]]
    reason: str


def rule(shards: Shards, redo: Iterable[int]) -> Rule:
    """redo: ranks that can run the body of a step once more.

    Without a vote, survivors may be one update apart, and the one ahead serves the others from its log. Where there
    are several shards, it might be the only one left of its own; and it cannot run a step once more that it is past.
    """
    found, again = groups(shards), sorted(redo)
    if len(found) > 1:
        return Rule(True, found, f"there are {len(found)} shards: all ranks must be at the same update after a failure")
    if again:
        return Rule(True, found, f"{named(again)} can redo a step: all ranks must be at its start for that")
    return Rule(False, found, "every rank is a replica of every other one, and nobody can redo a step")


def without(absent: Sequence[int], shards: Shards, seconds: float) -> Rule:
    """The rule of a job in which these ranks have not come to an update: a vote would wait for them for ever."""
    have = "has" if len(absent) == 1 else "have"
    return Rule(False, groups(shards), f"{named(absent)} {have} not come to an update within {seconds:g} s")


def groups(shards: Shards) -> list[list[int]]:
    """The ranks of each shard, in the order of the first ones. A rank of which nothing is known is alone."""
    by_shard: dict[object, list[int]] = {}
    for rank, shard in sorted(_filled(shards).items()):
        by_shard.setdefault(rank if shard is None else shard, []).append(rank)
    return sorted(by_shard.values())


def replicas(rank: int, shards: Shards, among: Iterable[int]) -> list[int]:
    """Those of `among` that are known to hold the shard of `rank`."""
    own = shards[rank]
    return [] if own is None else sorted(other for other in among if shards[other] == own)


def extinct(shards: Shards, live: Collection[int]) -> list[int]:
    """The ranks of a shard that nobody who is live holds; empty where there is none."""
    for ranks in groups(shards):
        if not any(rank in live or shards[rank] is None for rank in ranks):
            return ranks
    return []


def describe(found: Sequence[Sequence[int]], votes: bool) -> str:
    """'2 shards with 2 replicas each: ranks 0 2 | 1 3; every update waits for a vote'."""
    least, most = min(map(len, found)), max(map(len, found))
    of_each = f"{least} to {most} replicas" if least < most else f"{most} replica{'s' if most > 1 else ''} each"
    which = " | ".join(_few(ranks) for ranks in found[:_MOST_NAMED])
    more = " | …" if len(found) > _MOST_NAMED else ""
    voting = "; every update waits for a vote" if votes else ""
    return f"{len(found)} shards with {of_each}: ranks {which}{more}{voting}"


def alone(found: Sequence[Sequence[int]]) -> str:
    """What a person should know of shards without replicas; empty where there are none."""
    ranks = [only for only, *others in found if not others]
    if len(ranks) < 2:
        return "".join(f"rank {r} holds a shard that no other rank has: its failure would end the job" for r in ranks)
    return f"{named(ranks)} hold shards that no other rank has: the failure of one of them would end the job"


def named(ranks: Sequence[int]) -> str:
    """'rank 3' or 'ranks 3, 4'."""
    more = f" and {len(ranks) - _MOST_NAMED} others" if len(ranks) > _MOST_NAMED else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:_MOST_NAMED])) + more


def _few(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks[:_MOST_NAMED])) + (" …" if len(ranks) > _MOST_NAMED else "")


def _filled(shards: Shards) -> dict[int, str | None]:
    """Where all known shards are equal, every rank is taken for a replica: one that died with the message that names
    its shard is hardly the one that differs. It gets no copy by that guess, but what its set-up makes is compared."""
    known = {shard for shard in shards.values() if shard is not None}
    return dict(shards) if len(known) > 1 else dict.fromkeys(shards, min(known, default=""))

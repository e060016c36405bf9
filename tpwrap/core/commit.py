"""Where a recovery enters the training, how survivors get there, and whether its members agree: the commit rule, as
functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from tpwrap.control.messages import Ready, Released, Way
from tpwrap.core.shards import Shards, groups, named


class Impossible(Exception):
    """What the survivors report cannot be, whatever has failed: a bug of ours."""


@dataclass(frozen=True)
class Entry:
    """The step at which newcomers enter, and how survivors cross the failure.

    holders: survivors whose state is at `step`, once who is behind has rolled forward.
    forward: survivors that roll forward: they apply the update for which they hold valid gradients.
    way: None where survivors can cross the failure in neither way: `stuck` are those that stand against "replay".
    """

    step: int
    holders: list[int]
    forward: list[int]
    way: Way | None
    stuck: list[int]
    reason: str


@dataclass(frozen=True)
class Verdict:
    """step, apart: where the state of these replicas is not equal."""

    agree: bool
    reason: str
    step: int = -1
    apart: list[int] = field(default_factory=list)


def choose(released: Mapping[int, Released], votes: bool, floor: int = -1, redo: Collection[int] = ()) -> Entry:
    """The entry, from what each survivor reported. Raises Impossible.

    votes: the rule; False while it is not known: nobody has applied an update then. floor: the step of the last plan.
    redo: ranks that can run the body of a step once more.

    A survivor reports -1 until it knows that *every* rank has finished its set-up. So where one knows it, the
    others are at step 0; where none does, the failed rank may have died in its set-up, before it published
    anything. From a floor of 0 on everybody knew once, though not by itself.
    """
    if not released:
        return Entry(-1, [], [], "replay", [], "no rank is left: all start from the top of the script")
    reached = {rank: max(report.step, 0) + 1 if report.voted else report.step for rank, report in released.items()}
    if max(floor, *reached.values()) < 0:
        entry = Entry(-1, [], [], "replay", [], "not every survivor has finished its set-up: newcomers run it live")
    else:
        at = {rank: max(report.step, 0) for rank, report in released.items()}
        entry = _most_advanced(at, max(floor, *reached.values())) if votes else _least_advanced(at, floor)
    return _way(entry, released, redo)


def _most_advanced(at: Mapping[int, int], step: int) -> Entry:
    """In a job that votes: who has passed the vote of an update knows that all ranks hold valid gradients for it."""
    behind = sorted(rank for rank, own in at.items() if own < step)
    for rank in behind:
        if at[rank] < step - 1:
            raise Impossible(f"rank {rank} is at step {at[rank]}, though all have voted for update {step}")
    holders = sorted(at)
    if not behind:
        return Entry(step, holders, [], None, [], f"{_hold(holders)} step {step}")
    told = "that update was voted for: all ranks hold valid gradients"
    roll = "rolls" if len(behind) == 1 else "roll"
    return Entry(step, holders, behind, None, [], f"{named(behind)} {roll} forward to step {step}; {told}")


def _least_advanced(at: Mapping[int, int], floor: int) -> Entry:
    """In a job that does not vote: whoever is one update ahead keeps the inputs of that update's collectives, so it can
    serve a newcomer that executes the step; nobody can go back."""
    step = min(at.values())
    if step < floor:
        raise Impossible(f"the step went back from {floor} to {step}")
    holders = sorted(rank for rank, own in at.items() if own == step)
    ahead = sorted(rank for rank, own in at.items() if own > step)
    reason = f"{_hold(holders)} step {step}"
    if ahead:
        reason += f"; {named(ahead)} already applied the next update and will serve it from the log"
    return Entry(step, holders, [], None, [], reason)


def _way(entry: Entry, released: Mapping[int, Released], redo: Collection[int]) -> Entry:
    """Replay where every log reaches back; else redo where every survivor can, but nobody can redo its set-up."""
    stuck = sorted(rank for rank, report in released.items() if report.replay_from > entry.step)
    if not stuck:
        return replace(entry, way="replay")
    short = f"{named(stuck)} did not keep the collectives of the step"
    if entry.step >= 0 and all(rank in redo for rank in released):
        return replace(entry, way="redo", reason=f"{entry.reason}; {short}: all redo it")
    return replace(entry, way=None, stuck=stuck, reason=f"{entry.reason}; {short}")


def verify(ready: Mapping[int, Ready], shards: Shards, at: int | None = None) -> Verdict:
    """Replicas at the same step must hold bit-identical state, and the same gradient buckets.

    at: the step at which all must be by now (in a job that votes).
    """
    astray = sorted(rank for rank, report in ready.items() if at not in (None, report.step))
    if astray:
        return Verdict(False, f"{named(astray)} did not come to step {at}")
    for step in sorted({report.step for report in ready.values()}):
        digests = {rank: report.digest for rank, report in ready.items() if report.step == step}
        apart = divided(digests, shards)
        if apart:
            odd = _odd_ones_out(digests, apart)
            return Verdict(False, f"model and optimizer state differ after update {step}: {odd}", step, apart)
    layouts = {rank: report.layout for rank, report in ready.items()}
    apart = divided(layouts, shards)
    if apart:
        return Verdict(False, f"gradient buckets are laid out differently: {_odd_ones_out(layouts, apart)}")
    compared = sum(1 for report in ready.values() if report.digest)
    return Verdict(True, f"digests of {compared} of {len(ready)} ranks were compared and agree")


def divided(values: Mapping[int, str], shards: Shards) -> list[int]:
    """The first replicas whose values are not all equal; none where all agree. Who has an empty value is left out."""
    for ranks in groups(shards):
        told = [rank for rank in ranks if values.get(rank)]
        if len({values[rank] for rank in told}) > 1:
            return told
    return []


def _odd_ones_out(values: Mapping[int, str], ranks: list[int]) -> str:
    by_value: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_value[values[rank]].append(rank)
    ordered = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    return ", ".join(f"{named(ranks)} {'has' if len(ranks) == 1 else 'have'} {value[:12]}" for value, ranks in ordered)


def _hold(ranks: list[int]) -> str:
    return f"{named(ranks)} {'hold' if len(ranks) > 1 else 'holds'}"

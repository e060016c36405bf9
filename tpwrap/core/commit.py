"""Where a recovery enters the training, and whether its members agree: the commit rule, as functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tpwrap.control.messages import Ready


@dataclass(frozen=True)
class Entry:
    """The step at which newcomers enter and the ranks whose state is at that step."""

    step: int
    sources: list[int]
    reason: str


@dataclass(frozen=True)
class Verdict:
    agree: bool
    reason: str


def choose(released: Mapping[int, int], floor: int = -1) -> Entry:
    """The entry point, from what each survivor reported: rank -> optimizer updates applied (-1: set-up).

    The least advanced survivor decides. Whoever is one update ahead keeps the inputs of that update's
    collectives, so it can serve a newcomer that executes the step; nobody can go back.

    A survivor reports -1 until it knows that *every* rank has finished its set-up. So where one knows it, the
    others are at step 0; where none does, the failed rank may have died in its set-up, before it published
    anything. floor: the step of the last plan; from 0 on everybody knew once, though not by itself.
    """
    if not released:
        return Entry(-1, [], "no rank is left: all start from the top of the script")
    if max(floor, *released.values()) >= 0:
        released = {rank: max(step, 0) for rank, step in released.items()}
    step = min(released.values())
    if step < 0:
        return Entry(-1, [], "not every survivor has finished its set-up: newcomers run the script live")
    sources = sorted(rank for rank, at in released.items() if at == step)
    ahead = sorted(rank for rank, at in released.items() if at > step)
    reason = f"{_ranks(sources)} {'hold' if len(sources) > 1 else 'holds'} step {step}"
    if ahead:
        reason += f"; {_ranks(ahead)} already applied the next update and will serve it from the log"
    return Entry(step, sources, reason)


def verify(ready: Mapping[int, Ready]) -> Verdict:
    """Ranks at the same step must hold bit-identical state, and all the same gradient buckets.

    An empty digest or layout means that the rank has none to compare.
    """
    for step, digests in sorted(_by_step(ready).items()):
        odd = _odd_ones_out(digests)
        if odd:
            return Verdict(False, f"model and optimizer state differ after update {step}: {odd}")
    odd = _odd_ones_out({rank: report.layout for rank, report in ready.items() if report.layout})
    if odd:
        return Verdict(False, f"gradient buckets are laid out differently: {odd}")
    compared = sum(1 for report in ready.values() if report.digest)
    return Verdict(True, f"digests of {compared} of {len(ready)} ranks were compared and agree")


def _by_step(ready: Mapping[int, Ready]) -> dict[int, dict[int, str]]:
    steps: dict[int, dict[int, str]] = defaultdict(dict)
    for rank, report in ready.items():
        if report.digest:
            steps[report.step][rank] = report.digest
    return steps


def _odd_ones_out(values: Mapping[int, str]) -> str:
    """Who differs from the majority; empty where all are equal."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(values):
        groups[values[rank]].append(rank)
    if len(groups) < 2:
        return ""
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    return ", ".join(f"{_ranks(ranks)} {_has(ranks)} {value[:12]}" for value, ranks in ordered)


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"

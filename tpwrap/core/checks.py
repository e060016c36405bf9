"""Do replicas hold the same bits while they train (`--check-every`), and if not: which tensors, on which ranks?

A rank sends one digest of everything that replicas share. Only where these differ are ranks asked for their digests by
tensor (`Explain`), so that the job can end with what a person needs to know. A recovery that finds a difference asks in
the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpwrap.control.messages import Digest, Explain, Tensors
from tpwrap.core import commit, endings
from tpwrap.core.shards import named
from tpwrap.core.state import Doubt, Draft

_KEPT = 8
"""steps whose digests are waited for: ranks are never so far apart"""
_MOST_NAMED = 4


def told(d: Draft, rank: int, message: Digest) -> None:
    """Compared once all ranks have told theirs; those of a step that a failed rank has not come to are dropped."""
    d.put_rank(rank, step=max(message.step, d.state.ranks[rank].step))
    steps = {**d.state.digests, message.step: {**d.state.digests.get(message.step, {}), rank: message.digest}}
    mine = steps[message.step]
    if len(mine) == len(d.state.ranks):
        del steps[message.step]
    d.set(digests={step: steps[step] for step in sorted(steps)[-_KEPT:]})
    if len(mine) < len(d.state.ranks):
        return
    apart = commit.divided(mine, d.state.shards())
    if apart:
        doubt(d, message.step, apart, "")
    else:
        d.set(agreed=max(message.step, d.state.agreed))


def doubt(d: Draft, step: int, ranks: Sequence[int], where: str) -> None:
    """`ranks` are replicas, and not all equal after update `step`: ask them for more. where: "" or the first words of
    the ending."""
    if d.state.doubt is not None:
        return
    d.set(doubt=Doubt(step, tuple(ranks), where, d.now))
    for rank in ranks:
        d.send_rank(rank, Explain(step))


def explained(d: Draft, rank: int, message: Tensors) -> None:
    doubt = d.state.doubt
    if doubt is None or message.step != doubt.step or rank not in doubt.ranks:
        return
    d.set(doubt=replace(doubt, answers={**doubt.answers, rank: message.tensors}))
    if len(doubt.answers) + 1 == len(doubt.ranks):
        conclude(d)


def overdue(d: Draft) -> bool:
    """Whether the job has ended, because not all have explained themselves in time."""
    doubt = d.state.doubt
    if doubt is None or d.now - doubt.since < d.state.times.release:
        return False
    conclude(d)
    return True


def conclude(d: Draft) -> None:
    """End the job with all that is known by now."""
    doubt = d.state.doubt
    assert doubt is not None
    nodes = {rank: d.state.ranks[rank].place[0] for rank in doubt.ranks}
    d.end(*endings.states_differ(doubt.where + describe(doubt, nodes), d.state.agreed))


def describe(doubt: Doubt, nodes: Mapping[int, int]) -> str:
    """'rank 2 (node 2) differs from ranks 0, 1 after update 5 in model/weight'."""
    holders: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, tensors in sorted(doubt.answers.items()):
        if tensors:
            holders.setdefault(tuple(sorted(tensors.items())), []).append(rank)
    if len(holders) < 2:
        return f"{named(doubt.ranks)} are replicas, but do not hold the same state after update {doubt.step}"
    (usual, most), *odd = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
    against = f"from {_placed(most, nodes)} after update {doubt.step}"
    found = [
        f"{_placed(ranks, nodes)} {'differs' if len(ranks) == 1 else 'differ'} {against} in "
        + _tensors(dict(usual), dict(own))
        for own, ranks in odd
    ]
    tie = " (nothing tells which of them is right)" if len(most) == len(odd[0][1]) else ""
    return "; ".join(found) + tie


def _placed(ranks: Sequence[int], nodes: Mapping[int, int]) -> str:
    where = sorted({nodes[rank] for rank in ranks})
    return f"{named(ranks)} (node {where[0]})" if len(where) == 1 else named(ranks)


def _tensors(usual: Mapping[str, str], own: Mapping[str, str]) -> str:
    names = sorted(name for name in usual.keys() | own.keys() if usual.get(name) != own.get(name))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more

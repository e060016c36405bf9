"""Events as lines for a person, one for each thing worth knowing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tpwrap.core import events, shards

Names: TypeAlias = Mapping[int, str]
"""number of a node -> what Slurm calls it; others are called by their number"""
_NONE: Names = {}


def line(event: events.Event, names: Names = _NONE) -> str | None:
    """One line, or None for what only a full report shows. (A block of lines for `Protection`.)"""
    if isinstance(event, events.RankFailed):
        return f"rank {event.rank} failed{_seen(event.step)} on {_node(event.node, names)}: {event.cause}"
    if isinstance(event, events.NodeDown):
        if not event.ranks:
            return None  # SpareLost says more
        return f"{_node(event.node, names)} with {ranks(event.ranks)} is down: {event.cause}"
    if isinstance(event, events.SpareLost):
        left = {0: "no spare is left", 1: "1 spare is left"}.get(
            event.spares_left, f"{event.spares_left} spares are left"
        )
        return f"spare {_node(event.node, names)} is lost: {event.cause}; training goes on, {left}"
    if isinstance(event, events.FailoverFinished):
        return finished(event, names)
    if isinstance(event, events.FaultInjected):
        return f"injecting: {event.fault}"
    if isinstance(event, events.Ruled):
        return _shards(event) if len(event.shards) > 1 else None
    if isinstance(event, events.Notice):
        who = "" if event.rank is None else f"rank {event.rank}: "
        level = "" if event.level == "info" else f"{event.level}: "
        return f"{level}{who}{event.text}"
    if isinstance(event, events.Protection):
        return "\n".join(event.lines)
    return None


def full(event: events.Event, names: Names = _NONE) -> str:
    """Like `line`, for every kind of event."""
    if isinstance(event, events.JobStarted):
        return shape(event.nodes, event.spares, event.nproc_per_node)
    if isinstance(event, events.NodeJoined):
        name = f" {event.name}" if event.name else ""
        return f"node {event.node}{name} joined ({event.host}, pid {event.pid})"
    if isinstance(event, events.Arranged):
        who = f"training nodes: {_numbers(event.training, names)}; spares: {_numbers(event.spares, names)}"
        return f"{who} ({event.reason})"
    if isinstance(event, events.WorkerAssigned):
        return f"rank {event.rank} is {event.worker} on {_node(event.node, names)} (pid {event.pid})"
    if isinstance(event, events.FailoverStarted):
        return f"generation {event.generation}: {event.cause}"
    if isinstance(event, events.Ruled):
        rule = "every update waits for a vote" if event.votes else "updates wait for no vote"
        return line(event, names) or f"{rule}: {event.reason}"
    if isinstance(event, events.JobEnded):
        return f"exit code {event.exit_code}: {event.reason} ({counts(event)})"
    if isinstance(event, events.NodeDown) and not event.ranks:
        return f"{_node(event.node, names)} is down: {event.cause}"
    return line(event, names) or ""


def _shards(event: events.Ruled) -> str:
    """One line, and one more where a failure would end the job."""
    alone = shards.alone(event.shards)
    return shards.describe(event.shards, event.votes) + (f"\nwarning: {alone}" if alone else "")


def shape(nodes: int, spares: int, nproc_per_node: int) -> str:
    """'4 nodes and 1 spare, 1 rank each'."""
    parts = f"{nodes} node{'s' if nodes > 1 else ''}"
    parts += f" and {spares} spare{'s' if spares > 1 else ''}" if spares else ", no spare"
    return f"{parts}, {nproc_per_node} rank{'s' if nproc_per_node > 1 else ''} each"


def counts(event: events.JobEnded) -> str:
    """'60 steps, 1 failover'."""
    failovers = f"{event.failovers} failover{'' if event.failovers == 1 else 's'}"
    return f"{event.steps} step{'' if event.steps == 1 else 's'}, {failovers}"


def finished(event: events.FailoverFinished, names: Names = _NONE) -> str:
    """Where the ranks went, and how long training stood still."""
    moved = "; ".join(
        f"rank {m.rank} goes on in its own slot"
        if m.same_slot
        else f"{_node(m.to_node, names)} takes over rank {m.rank} from {_node(m.from_node, names)}"
        for m in event.moves
    )
    by = "" if event.way == "replay" else f" by {event.way}"
    resumed = f"training resumed{_at(event.step)}{by} after {event.seconds:.2f} s"
    stages = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in event.stages.items())
    return f"{moved or 'the same ranks go on'}; {resumed}" + (f" ({stages})" if stages else "")


def _numbers(numbers: Sequence[int], names: Names) -> str:
    return ", ".join(names.get(number, str(number)) for number in numbers) or "none"


def _node(node: int, names: Names) -> str:
    return f"node {names.get(node, node)}"


def ranks(numbers: Sequence[int]) -> str:
    """'rank 3' or 'ranks 3, 4'."""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _at(step: int) -> str:
    return " during set-up" if step < 0 else f" at step {step}"


def _seen(step: int) -> str:
    """Ranks report their step a few times a second, so a failure may be some steps later."""
    return " during set-up" if step < 0 else f" (last heard of at step {step})"

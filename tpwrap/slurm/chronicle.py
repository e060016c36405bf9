"""From the job's events: what Slurm should be told. Decisions only; `tpwrap.slurm.reporter` carries them out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from tpwrap.core import events
from tpwrap.slurm import comment

SETTLE = 0.5
"""seconds between the loss of a node and draining it: a job that is being cancelled loses its nodes, too, one by one"""
_LONGEST_CAUSE = 100


@dataclass(frozen=True)
class Drain:
    """A node that is to get no new job. reason: why, and at which step."""

    node: str
    reason: str


@dataclass(frozen=True)
class _Lost:
    node: int
    cause: str
    at: float


class Chronicle:
    """Feed it every event; ask it what the comment should be, and which nodes are due to be drained."""

    def __init__(self, names: Mapping[int, str], own_comment: str) -> None:
        self._names = names
        self._own = comment.users_own(own_comment)
        self._world = 0
        self._spares_at_start = 0
        self._spares: set[int] = set()
        self._failovers = 0
        self._entries: list[str] = []
        self._lost: list[_Lost] = []
        self._rehearsed: set[int] = set()
        self._causes: dict[int, str] = {}
        self._step = -1
        self._end = ""
        self._arranged = False

    def note(self, event: events.Event, at: float) -> None:
        """at: when it happened, seconds since 1970."""
        if isinstance(event, events.JobStarted):
            self._world = event.nodes * event.nproc_per_node
            self._spares_at_start = event.spares
        elif isinstance(event, events.Arranged):
            self._spares = set(event.spares)
            self._arranged = True
        elif isinstance(event, events.FaultInjected):
            if event.fault.startswith("node="):
                self._rehearsed.add(event.node)
        elif isinstance(event, events.RankFailed):
            self._causes[event.rank] = event.cause
            self._step = max(self._step, event.step)
        elif isinstance(event, events.NodeDown):
            self._spares.discard(event.node)
            if event.ranks:
                self._lose(event.node, event.cause, at)
        elif isinstance(event, events.SpareLost):
            self._spares.discard(event.node)
            self._lose(event.node, event.cause, at)
            self._tell(at, f"spare {self._name(event.node)} lost: {_short(event.cause)}")
        elif isinstance(event, events.FailoverFinished):
            self._finished(event, at)
        elif isinstance(event, events.JobEnded):
            self._ended(event)

    def comment(self) -> str:
        """What the job's Comment should be now."""
        summary = (
            f"ranks={self._world} spares={len(self._spares)}/{self._spares_at_start} failovers={self._failovers}"
            + (f" {self._end}" if self._end else "")
        )
        return comment.render(self._own, summary, self._entries)

    def full_story(self) -> str:
        """Every entry, however many: for AdminComment."""
        return "; ".join(self._entries)

    @property
    def begun(self) -> bool:
        """Whether there is something to tell: it is known who trains, or that nobody will."""
        return self._arranged or self.ended

    @property
    def ended(self) -> bool:
        return bool(self._end)

    def due(self, now: float) -> list[Drain]:
        """Nodes to drain now; each is named once."""
        ripe = [one for one in self._lost if now - one.at >= SETTLE]
        self._lost = [one for one in self._lost if one not in ripe]
        return [Drain(self._name(one.node), self._reason(one.cause)) for one in ripe]

    def waits(self) -> bool:
        """Whether a node will become due by the passing of time."""
        return bool(self._lost)

    def _lose(self, node: int, cause: str, at: float) -> None:
        if node not in self._rehearsed:
            self._lost.append(_Lost(node, cause, at))

    def _reason(self, cause: str) -> str:
        return _short(cause) + (f" step {self._step}" if self._step >= 0 else "")

    def _finished(self, event: events.FailoverFinished, at: float) -> None:
        self._failovers += 1
        self._step = max(self._step, event.step)
        self._spares -= {move.to_node for move in event.moves}
        when = "in set-up" if event.step < 0 else f"step {event.step}"
        when += "" if event.way == "replay" else f" {event.way}"
        by_way: dict[tuple[int, int], list[int]] = {}
        for move in event.moves:
            by_way.setdefault((move.from_node, move.to_node), []).append(move.rank)
        for (source, target), ranks in by_way.items():
            numbers = ",".join(map(str, ranks))
            who = f"rank{'s' if len(ranks) > 1 else ''} {numbers}"
            way = f"{who} healed on {self._name(source)}"
            if source != target:
                way = f"{self._name(source)}->{self._name(target)} {who}"
            rehearsed = " (rehearsal)" if source in self._rehearsed else ""
            cause = _short(self._causes.get(ranks[0], event.reason))
            self._tell(at, f"{way} {when} {event.seconds:.1f}s{rehearsed}: {cause}")

    def _ended(self, event: events.JobEnded) -> None:
        if event.exit_code >= 128:
            self._lost.clear()  # who stops a job kills its nodes; none of them has failed
        self._end = "finished" if event.exit_code == 0 else f"ended with code {event.exit_code}: {_short(event.reason)}"

    def _tell(self, at: float, text: str) -> None:
        self._entries.append(f"{time.strftime('%H:%M:%S', time.localtime(at))} {text}")

    def _name(self, node: int) -> str:
        return self._names.get(node, f"node {node}")


def _short(cause: str) -> str:
    text = " ".join(cause.split())
    return text if len(text) <= _LONGEST_CAUSE else text[: _LONGEST_CAUSE - 1] + "~"

"""What happened, for people and reports: one event is one line of `events.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from tpwrap.core.lint import Finding


def _kind(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class _Base(msgspec.Struct, frozen=True, tag_field="kind", tag=_kind):
    """Base of all events. The field `kind` is the class name in snake case."""


class JobStarted(_Base, frozen=True):
    pid: int
    """of the coordinator"""
    run_id: str
    nodes: int
    nproc_per_node: int
    spares: int
    unit: str
    failure_timeout: float
    store: str
    faults: list[str]


class NodeJoined(_Base, frozen=True):
    node: int
    host: str
    pid: int
    """of the supervisor"""
    slots: int
    name: str = ""
    """as Slurm calls it; "" outside Slurm"""


class Arranged(_Base, frozen=True):
    """All nodes have joined or were given up: who trains, in the order of the ranks, and who waits."""

    training: list[int]
    spares: list[int]
    reason: str


class WorkerAssigned(_Base, frozen=True):
    rank: int
    node: int
    slot: int
    worker: str
    pid: int
    generation: int
    incarnation: int


class RankFailed(_Base, frozen=True):
    rank: int
    node: int
    slot: int
    worker: str
    """empty where no worker held the rank yet"""
    cause: str
    step: int
    """last step known of this rank"""
    generation: int
    """in which it failed"""


class NodeDown(_Base, frozen=True):
    node: int
    cause: str
    ranks: list[int]


class SpareLost(_Base, frozen=True):
    node: int
    cause: str
    spares_left: int
    """nodes that are up and hold no rank"""


class FailoverStarted(_Base, frozen=True):
    generation: int
    ranks: list[int]
    """ranks that need a new worker; empty: the same members go on (a collective failed)"""
    cause: str


class Move(msgspec.Struct, frozen=True):
    rank: int
    from_node: int
    to_node: int
    same_slot: bool


class FailoverFinished(_Base, frozen=True):
    generation: int
    ranks: list[int]
    moves: list[Move]
    step: int
    """where the newcomers entered; -1: during set-up"""
    stages: dict[str, float]
    """stage -> seconds: detect, release, decide, restore, resume"""
    timings: dict[str, float]
    """as the workers report them: the slowest rank of each"""
    seconds: float
    """all stages together: from the failure (injected) or its detection until every rank goes on"""
    replayed: int
    """most collectives that one survivor ran again"""
    reason: str
    muted: dict[str, int] = {}
    """by kind: calls with effects outside (files, saves) that newcomers of unmodified scripts left out on their way"""
    way: str = "replay"
    """how survivors crossed the failure: replay | redo"""


class Notice(_Base, frozen=True):
    level: str
    """info | warning | error"""
    text: str
    rank: int | None = None


class Protection(_Base, frozen=True):
    """What of the script is protected and what is not: rank 0's block, and later what is new."""

    rank: int
    step: int
    """updates that the rank had applied"""
    lines: list[str]
    findings: list[Finding]


class Ruled(_Base, frozen=True):
    """All ranks have come to their first update: who are replicas of each other, and whether every update waits for a
    vote."""

    shards: list[list[int]]
    """the ranks of each"""
    votes: bool
    reason: str


class FaultInjected(_Base, frozen=True):
    fault: str
    rank: int
    node: int


class JobEnded(_Base, frozen=True):
    exit_code: int
    reason: str
    traceback: str
    steps: int
    failovers: int


Event: TypeAlias = (
    JobStarted
    | NodeJoined
    | Arranged
    | WorkerAssigned
    | RankFailed
    | NodeDown
    | SpareLost
    | FailoverStarted
    | FailoverFinished
    | Notice
    | Protection
    | Ruled
    | FaultInjected
    | JobEnded
)

STAGES = ("detect", "release", "decide", "restore", "resume")
"""The stages of a failover, in order.

detect: from the injected fault, or the last sign of life of a node that fell silent, to the news of the failure (0
where nobody knows when it happened).
release: until every survivor has let go. decide: until every lost rank has a slot with a warm worker in it.
restore: until every member has rebuilt its communicators and holds the right state.
resume: until every rank goes on.
"""


def timeline(marks: Sequence[tuple[str, float]], end: float) -> dict[str, float]:
    """Stage -> seconds. marks: (stage, when it began), in order; a stage that came several times adds up."""
    stages = dict.fromkeys(STAGES, 0.0)
    for (stage, begin), (_, until) in zip(marks, [*marks[1:], ("", end)], strict=False):
        stages[stage] = stages.get(stage, 0.0) + max(0.0, until - begin)
    return stages


def slowest(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest value of each timing over all ranks."""
    worst: dict[str, float] = {}
    for report in reports:
        for name, seconds in report.items():
            worst[name] = max(seconds, worst.get(name, seconds))
    return worst


def render(event: FailoverFinished) -> str:
    """One failover for a person: who moved and why, then the time by stage."""
    who = "rank " if len(event.ranks) == 1 else "ranks "
    who = who + ", ".join(map(str, event.ranks)) if event.ranks else "no rank"
    stages = "  ".join(f"{name} {1000 * event.stages.get(name, 0.0):.0f} ms" for name in STAGES)
    at = "during set-up" if event.step < 0 else f"at step {event.step}"
    by = "" if event.way == "replay" else f" by {event.way}"
    return f"{who} replaced {at}{by} in {1000 * event.seconds:.0f} ms: {stages}"


# --- events.jsonl ---------------------------------------------------------------------------------------


class _Stamped(msgspec.Struct, frozen=True):
    time: float


_encode = msgspec.json.Encoder().encode
_decode_time = msgspec.json.Decoder(_Stamped).decode
_decode_event: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def to_line(event: Event, time: float) -> bytes:
    """One line, newline included; `time` in seconds since 1970 is added as the first field."""
    return b'{"time":%.6f,' % time + _encode(event)[1:] + b"\n"


def from_line(line: bytes | str) -> tuple[float, Event]:
    """The inverse of `to_line`."""
    return _decode_time(line).time, _decode_event.decode(line)

"""The state that membership decides on, what it observes and what it answers: data only.

`State` is never changed in place. `Draft` collects the changes, actions and reasons of one transition.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tpwrap.control.messages import (
    CoordinatorToWorker,
    Failed,
    FirstUpdate,
    Plan,
    Ready,
    Released,
    Whereabouts,
    WorkerMessage,
)
from tpwrap.core import events
from tpwrap.core.arrangement import Site
from tpwrap.core.job import Job
from tpwrap.core.lint import Told
from tpwrap.core.placement import LossKind, Place
from tpwrap.core.timeouts import Timeouts

# --- what the coordinator observes -----------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """A supervisor has connected."""

    node: int
    host: str
    pid: int
    slots: int
    sidecars: str
    name: str = ""
    site: Site = field(default_factory=Site)


@dataclass(frozen=True)
class Heard:
    """A sign of life of a supervisor."""

    node: int


@dataclass(frozen=True)
class NodeLost:
    """The supervisor's process or connection has ended: with it its node."""

    node: int
    how: str


@dataclass(frozen=True)
class Exited:
    """A worker process has ended."""

    node: int
    worker: str
    returncode: int
    hung: bool = False


@dataclass(frozen=True)
class SlotBroken:
    """A slot brings no worker up: how the attempts ended, and the return code of the last one."""

    node: int
    slot: int
    how: str
    returncode: int


@dataclass(frozen=True)
class Said:
    """A worker has sent a message."""

    node: int
    slot: int
    worker: str
    message: WorkerMessage


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Stop:
    """Someone wants the job to end: Ctrl-C or SIGTERM."""

    signal: str


@dataclass(frozen=True)
class Left:
    """A supervisor was told by a signal to end."""

    node: int
    signal: str


@dataclass(frozen=True)
class StoreLost:
    """The rendezvous store has ended: no new communicator can be made."""


Observation: TypeAlias = Joined | Heard | NodeLost | Exited | SlotBroken | Said | Tick | Stop | Left | StoreLost

# --- what it answers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    node: int
    worker: str
    message: CoordinatorToWorker


@dataclass(frozen=True)
class KillWorker:
    """Fence one worker."""

    node: int
    worker: str


@dataclass(frozen=True)
class FenceNode:
    """Fence a whole node: tell its supervisor to end everything, and listen to it no more."""

    node: int
    reason: str


@dataclass(frozen=True)
class Emit:
    event: events.Event


@dataclass(frozen=True)
class End:
    """The job is over; always the last action."""

    exit_code: int
    reason: str
    traceback: str = ""


Action: TypeAlias = Send | KillWorker | FenceNode | Emit | End


# --- state -----------------------------------------------------------------------------------------


class Stage(enum.Enum):
    STARTING = "starting"
    """generation 0: ranks are given out as workers become warm"""
    RUNNING = "running"
    RELEASING = "releasing"
    """survivors let go of the old generation"""
    PLACING = "placing"
    """every lost rank has a slot; some slots have no warm worker yet"""
    RESTORING = "restoring"
    """members rebuild communicators and restore state"""
    RESUMING = "resuming"
    """all ranks are live; some have not said so yet"""
    ENDED = "ended"


class NodeStatus(enum.Enum):
    EXPECTED = "expected"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True)
class Node:
    status: NodeStatus = NodeStatus.EXPECTED
    host: str = ""
    slots: int = 0
    sidecars: str = ""
    heard: float = 0.0
    site: Site = field(default_factory=Site)


@dataclass(frozen=True)
class Worker:
    id: str
    node: int
    slot: int
    pid: int
    address: str
    rank: int | None = None
    """None: warm and waiting"""


@dataclass(frozen=True)
class Loss:
    kind: LossKind
    cause: str
    exited_with_0: bool = False


@dataclass(frozen=True)
class Rank:
    rank: int
    place: Place
    worker: str | None = None
    live: bool = False
    """False: no worker, or a newcomer that has not caught up"""
    finished: bool = False
    shard: str | None = None
    """its name at the end of its set-up; None: it has not told. This and `first` are the script's, so they outlive the
    worker that told them, unless the next one runs the set-up, too."""
    first: FirstUpdate | None = None
    """what it told when it came to its first update"""
    step: int = -1
    """last step known; -1: in set-up"""
    incarnation: int = -1
    assigned_at: float = 0.0
    buddies: tuple[int, ...] = ()
    keepers: tuple[int, ...] = ()
    """nodes that have been its buddies, newest first: any of them may hold its sidecar"""
    loss: Loss | None = None
    """why it needs a new slot; None once it has one"""
    strike_step: int = -2
    strikes: int = 0
    failed: Failed | None = None
    """the last exception of its script, until the recovery from it is over"""
    failed_at: float = 0.0


@dataclass(frozen=True)
class Hint:
    """A collective failed somewhere and nobody is known to be dead."""

    since: float
    rank: int
    error: str


@dataclass(frozen=True)
class Standstill:
    """How long nothing has moved, and what the ranks said about it (`tpwrap.core.standstill`)."""

    moved: float
    """when a rank was last seen to move"""
    longest: float | None = None
    """the longest time between two steps; None: no step was seen yet"""
    notices: int = 0
    """since anything moved"""
    generation: int = 0
    """the rounds of questions below are about this one"""
    asked: float = 0.0
    collecting: bool = False
    """the answers to the last question are still coming in"""
    answers: Mapping[int, Whereabouts] = field(default_factory=dict)
    before: Mapping[int, Whereabouts] = field(default_factory=dict)
    """the answers to the question before"""


@dataclass(frozen=True)
class Doubt:
    """Replicas were found to differ, and are asked in which tensors (`tpwrap.core.checks`)."""

    step: int
    ranks: tuple[int, ...]
    where: str
    """what was going on, as the first words of the ending; "" in training"""
    since: float
    answers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Injection:
    at: float
    rank: int
    node: int


@dataclass(frozen=True)
class Failover:
    """One pause of the job, from the first failure to the last Resumed; later failures fold into it."""

    marks: tuple[tuple[str, float], ...]
    """(stage, when it began), see `events.timeline`"""
    origins: Mapping[int, Place] = field(default_factory=dict)
    """rank that failed -> the slot it had first"""
    reasons: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    muted: Mapping[str, int] = field(default_factory=dict)
    replayed: int = 0
    started_over: bool = False
    """once already, several members were not ready in time"""


@dataclass(frozen=True)
class State:
    job: Job
    times: Timeouts
    store: str
    run_id: str
    stage: Stage
    since: float
    """when the stage began"""
    last_tick: float
    nodes: Mapping[int, Node]
    ranks: Mapping[int, Rank]
    workers: Mapping[str, Worker] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    """workers that ended or were fenced: whatever still arrives from them is dropped"""
    bad_slots: frozenset[Place] = frozenset()
    broken: Mapping[Place, SlotBroken] = field(default_factory=dict)
    """slots that bring no worker up, as long as none comes from there after all"""
    generation: int = 0
    plan: Plan | None = None
    awaiting: frozenset[int] = frozenset()
    """ranks whose answer the stage needs (STARTING, PLACING: whose slot has no warm worker yet)"""
    released: Mapping[int, Released] = field(default_factory=dict)
    ready: Mapping[int, Ready] = field(default_factory=dict)
    failover: Failover | None = None
    failovers: int = 0
    hint: Hint | None = None
    hint_step: int = -2
    hint_rounds: int = 0
    fired: frozenset[int] = frozenset()
    injections: tuple[Injection, ...] = ()
    modules: tuple[str, ...] = ()
    """what warm workers should import"""
    setup_seconds: float = 0.0
    """longest set-up of any rank so far"""
    votes: bool | None = None
    """the rule: whether every update waits for a vote; None: not every rank has come to an update yet"""
    first_update: float | None = None
    """since when some rank waits for the rule"""
    any_set_up: bool = False
    """some rank has been at a step boundary: there is state to lose"""
    notices: frozenset[str] = frozenset()
    told: Told = field(default_factory=Told)
    """about the protection of the script"""
    weights: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    """by step: the first rank that told the digest of its weights, and the digest"""
    digests: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    """by step and rank, of steps for which not all ranks have told theirs"""
    agreed: int = -1
    """newest step at which all replicas were found to be equal"""
    doubt: Doubt | None = None
    standstill: Standstill = Standstill(0.0)
    store_lost: bool = False
    leaving: Mapping[int, tuple[float, str]] = field(default_factory=dict)
    """nodes whose supervisors were told to end: since when, and by which signal"""

    @property
    def ended(self) -> bool:
        return self.stage is Stage.ENDED

    def up_nodes(self) -> list[int]:
        return [index for index, node in self.nodes.items() if node.status is NodeStatus.UP]

    def all_joined(self) -> bool:
        return all(node.status is not NodeStatus.EXPECTED for node in self.nodes.values())

    def sites(self) -> dict[int, Site]:
        """Of the nodes that are or were up."""
        return {index: node.site for index, node in self.nodes.items()}

    def shards(self) -> dict[int, str | None]:
        """The names by which ranks are known to be replicas. A script may complete what it trains after its set-up, so
        those told there count only until all have told the ones of their first update."""
        if self.votes is None:
            return {rank: view.shard for rank, view in self.ranks.items()}
        return {rank: None if view.first is None else view.first.shard for rank, view in self.ranks.items()}

    def absent(self) -> list[int]:
        """Ranks that have not come to an update, and may still."""
        return [rank for rank, view in self.ranks.items() if view.first is None and not view.finished]

    def can_redo(self) -> list[int]:
        return [rank for rank, view in self.ranks.items() if view.first is not None and view.first.redo]

    def taken(self) -> set[Place]:
        return {rank.place for rank in self.ranks.values()}

    def free_slots(self) -> dict[int, list[int]]:
        """node -> slots that are up, hold no rank and are not given up."""
        taken = self.taken() | self.bad_slots | self.broken.keys()
        return {
            node: [slot for slot in range(self.nodes[node].slots) if (node, slot) not in taken]
            for node in self.up_nodes()
        }

    def spare_nodes(self) -> list[int]:
        holding = {node for node, _ in self.taken()}
        return [node for node in self.up_nodes() if node not in holding]

    def warm_worker(self, place: Place) -> Worker | None:
        for worker in self.workers.values():
            if worker.rank is None and (worker.node, worker.slot) == place:
                return worker
        return None


@dataclass(frozen=True)
class Transition:
    state: State
    actions: list[Action]
    reasons: list[str]
    """what was decided and why, for the log"""


class Draft:
    """One transition in the making. Mappings are copied once, when first written to."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []
        self.reasons: list[str] = []
        self._own: dict[str, dict[Any, Any]] = {}

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        for name in changes:
            self._own.pop(name, None)

    def _mapping(self, name: str) -> dict[Any, Any]:
        if name not in self._own:
            copy = dict(getattr(self.state, name))
            self.set(**{name: copy})
            self._own[name] = copy
        return self._own[name]

    def put_rank(self, rank: int, **changes: Any) -> None:
        ranks = self._mapping("ranks")
        ranks[rank] = replace(ranks[rank], **changes)

    def put_node(self, node: int, **changes: Any) -> None:
        nodes = self._mapping("nodes")
        nodes[node] = replace(nodes[node], **changes)

    def put_worker(self, worker: Worker) -> None:
        self._mapping("workers")[worker.id] = worker

    def drop_worker(self, worker: str) -> None:
        self._mapping("workers").pop(worker, None)
        self.set(gone=self.state.gone | {worker})

    def put(self, mapping: str, key: int, value: object) -> None:
        """For the small per-generation mappings `released` and `ready`."""
        self._mapping(mapping)[key] = value

    def enter(self, stage: Stage, awaiting: frozenset[int]) -> None:
        self.set(stage=stage, since=self.now, awaiting=awaiting)

    def answered(self, rank: int) -> bool:
        """Take `rank` off the list; True when it was the last one."""
        self.set(awaiting=self.state.awaiting - {rank})
        return not self.state.awaiting

    def send(self, worker: str, message: CoordinatorToWorker) -> None:
        known = self.state.workers.get(worker)
        if known is not None:
            self.actions.append(Send(known.node, worker, message))

    def send_rank(self, rank: int, message: CoordinatorToWorker) -> None:
        worker = self.state.ranks[rank].worker
        if worker is not None:
            self.send(worker, message)

    def emit(self, event: events.Event) -> None:
        self.actions.append(Emit(event))

    def say(self, reason: str) -> None:
        self.reasons.append(reason)

    def end(self, exit_code: int, reason: str, traceback: str = "") -> None:
        """End the job. Nothing may be added to the draft afterwards."""
        if self.state.ended:
            return
        self.enter(Stage.ENDED, frozenset())
        self.say(reason)
        steps = max(0, *(rank.step for rank in self.state.ranks.values()))
        self.emit(events.JobEnded(exit_code, reason, traceback, steps, self.state.failovers))
        self.actions.append(End(exit_code, reason, traceback))

    def done(self) -> Transition:
        return Transition(self.state, self.actions, self.reasons)

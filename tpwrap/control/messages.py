"""Every message of the control plane, as data.

Three parties talk: the **coordinator** (one per job), a **supervisor** (one per node), a **worker**
(one training process; holds a rank, or is warm and waits). Workers speak only to their supervisor; the
supervisor relays `FromWorker` and `ToWorker` unread. Wire encoding: `tpwrap.control.wire`.

A failure, in messages (generation g is the new one):

    supervisor  -> coordinator   WorkerExited | (connection lost)
    coordinator -> survivors     Release(g)         poison old communicators, hold at the commit gate
    survivors   -> coordinator   Released(g, step)  drained; `step` changes only as the plan says
    coordinator -> everybody     Plan(g)            to the newcomer inside Assign
    everybody   -> coordinator   Ready(g, digest)   rebuilt, restored, probed
    coordinator -> everybody     Resume(g)          only if all digests of a shard at the same step agree
    everybody   -> coordinator   Resumed(g)

Before a rank applies its first optimizer update, the coordinator tells whether the job *votes*: whether, before every
update k, each rank waits until all ranks have finished all their operations of step k.

    worker      -> coordinator   SetupDone(shard)   ranks with the same shard are replicas of each other
    worker      -> coordinator   FirstUpdate(redo)  and waits for
    coordinator -> workers       Rule(votes)        once all ranks have sent theirs

In a job that votes, whoever has passed the vote of an update applies it, and a plan may tell the others to do so, too
(they *roll forward*): all ranks are at the plan's step when they are ready. In one that does not, survivors may be one
update ahead of the plan's step. A message that carries a generation older than the receiver's is dropped, never obeyed.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tpwrap.core.lint import Facts

PROTOCOL = 5

Way: TypeAlias = Literal["replay", "redo"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages: immutable, encoded as a tagged msgpack array."""


# --- worker -> coordinator (relayed by its supervisor) ---------------------------------------------


class WarmReady(Message, frozen=True):
    """The process is warm: torch imported, toy step done, state server listening on `address`."""

    pid: int
    address: str
    """host:port of the worker's state server (tpwrap.engine.transfer)."""


class SetupDone(Message, frozen=True):
    """The rank reached its first step boundary; `modules` is what a warm process should import too.

    shard: ranks with the same one hold the same parameters; "" where every rank is a replica of every other one.
    """

    generation: int
    modules: list[str]
    shard: str = ""


class FirstUpdate(Message, frozen=True):
    """The rank has come to its first optimizer update and applies it once it has been told the `Rule`. One that can
    redo steps says so at the start of its first one.

    redo: it can run the body of a step once more from its start.
    shard: as in `SetupDone`, but now that training has begun: this one counts.
    """

    redo: bool
    shard: str = ""


class CommError(Message, frozen=True):
    """A collective failed here. A hint: peers die for a reason that the coordinator learns elsewhere;
    if nobody is found dead within the grace period, the same members get a new generation."""

    generation: int
    error: str


class Released(Message, frozen=True):
    """All inner communicators are aborted and drained and the commit gate is shut.

    step: optimizer updates applied by this rank; -1 while it has not reached its first step boundary.
    voted: it has passed the vote of the update after `step`, or was told by a plan to roll forward over it: it will
        apply that update whatever happens.
    replay_from: the earliest step from whose start its log of collectives is complete; -1: from set-up.
    """

    generation: int
    step: int
    seconds: float
    voted: bool = False
    replay_from: int = -1


class Ready(Message, frozen=True):
    """Communicators of `generation` stand and are probed; a newcomer's state is restored.

    step: as in `Released` (a newcomer: the plan's step).
    digest: hex digest of parameters, optimizer state and scalars at `step`; "" where there is no session.
    layout: hash of the gradient bucket layout, "" where unknown.
    timings: seconds by stage.
    """

    generation: int
    step: int
    digest: str
    layout: str
    timings: dict[str, float]


class Muted(Message, frozen=True):
    """To the supervisor, which keeps it: so much has a newcomer that runs a script not printed up to its entry. Sent
    before `Ready`.

    lines: complete lines, of both streams. last: the last few of them, without their ends.
    """

    lines: int
    last: list[bytes]


class Resumed(Message, frozen=True):
    """The held collectives are completed (survivor) or the newcomer runs live."""

    generation: int
    timings: dict[str, float]
    replayed: int
    muted: dict[str, int] = {}
    """by kind: calls with effects outside that the newcomer left out on its way"""


class Progress(Message, frozen=True):
    """At most a few times a second: the last committed step, for reports and hang detection."""

    step: int


class Digest(Message, frozen=True):
    """Every so many updates (`--check-every`): of all that replicas share, after update `step`."""

    step: int
    digest: str


class Tensors(Message, frozen=True):
    """The answer to `Explain`: name -> digest, of the tensors and "scalars"; empty where they are no longer known."""

    step: int
    tensors: dict[str, str]


class Injecting(Message, frozen=True):
    """The worker is about to inject fault `fault` and waits for `InjectAck` (so each fires once)."""

    fault: int


class Failed(Message, frozen=True):
    """The user's script raised, or asked to exit with a code other than 0."""

    step: int
    error: str
    """one line: type and message"""
    traceback: str
    exit_code: int


class Finished(Message, frozen=True):
    """The script has ended well; the process lingers (it can still replay) until `Bye`."""

    step: int


class Notice(Message, frozen=True):
    """Something a person should read once, for instance what is not protected and what to do."""

    level: str
    """info | warning | error"""
    text: str


class Protection(Message, frozen=True):
    """What the engine has recognised of the script so far; sent again, whole, when more is known."""

    facts: Facts


class Unprotected(Message, frozen=True):
    """The rank met something it cannot recover from soundly: the job must end with this reason."""

    reason: str


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """An operation of a process group that this rank has issued and that has not completed."""

    group: str
    operation: str
    step: int
    number: int
    """among the collectives of the step in that group, from 0; -1: no collective"""
    seconds: float
    everyone: bool
    """all ranks are members of the group"""


class Whereabouts(Message, frozen=True):
    """The answer to `Look`.

    waits: the oldest unfinished operation of each group, and each group whose members have not all come yet.
    joined: group -> the first collective this rank has not taken part in, as (step, number).
    line: where the script is, "train.py:42"; "" where that cannot be told.
    """

    generation: int
    step: int
    waits: list[Waiting]
    joined: dict[str, tuple[int, int]]
    line: str


WorkerMessage: TypeAlias = (
    WarmReady
    | SetupDone
    | FirstUpdate
    | CommError
    | Released
    | Ready
    | Muted
    | Resumed
    | Progress
    | Digest
    | Tensors
    | Injecting
    | Failed
    | Finished
    | Notice
    | Protection
    | Unprotected
    | Whereabouts
)

# --- coordinator -> worker (relayed) ----------------------------------------------------------------


class Plan(Message, frozen=True):
    """How generation `generation` is put together.

    step: where newcomers enter: they resume right after optimizer update number `step`
        (0: before the first batch; -1: run the script live from its start). Where the job votes, survivors that are
        behind roll forward to it.
    members: rank -> state server address, complete (index = rank).
    sources: newcomer rank -> live replicas of its shard whose model state is at `step`, any of which can serve it;
        empty where none is needed or known to be one: what the newcomer's own set-up made stands.
    newcomers: ranks that are not live yet.
    buddies: for each rank the sidecar servers ("host:port") of the nodes that keep its sidecar *from now on*.
    keepers: for each newcomer rank the sidecar servers that may hold its sidecar of `step`.
    way: how survivors cross the failure. "replay": the collectives of their step run again from the kept inputs.
        "redo": the body of their step runs once more from its start.
    votes: the `Rule`; None while it is not known.
    """

    generation: int
    step: int
    members: list[str]
    sources: dict[int, list[int]]
    newcomers: list[int]
    buddies: list[list[str]]
    keepers: dict[int, list[str]]
    way: Way
    votes: bool | None


class Assign(Message, frozen=True):
    """A warm worker becomes `rank`. `plan` is None only in the first generation of the job.

    env: variables to set before the user's script starts (RANK, WORLD_SIZE, LOCAL_RANK, …).
    store: host:port of the rendezvous store. faults: injections still to fire, as (id, text).
    """

    generation: int
    rank: int
    world_size: int
    env: dict[str, str]
    store: str
    incarnation: int
    faults: list[tuple[int, str]]
    buddies: list[list[str]]
    plan: Plan | None


class Rule(Message, frozen=True):
    """The answer to `FirstUpdate`, the same for all ranks and for the rest of the job: whether it votes."""

    votes: bool


class Release(Message, frozen=True):
    generation: int
    cause: str


class Resume(Message, frozen=True):
    generation: int


class InjectAck(Message, frozen=True):
    """`fire` is False when the fault has been injected already elsewhere."""

    fault: int
    fire: bool


class Warm(Message, frozen=True):
    """To a warm worker: import these modules now."""

    modules: list[str]


class Look(Message, frozen=True):
    """Nothing moves: say where you are (`Whereabouts`)."""


class Explain(Message, frozen=True):
    """Replicas differ after update `step`: say in which tensors (`Tensors`)."""

    step: int


class Bye(Message, frozen=True):
    """Every rank has finished: exit with 0."""


class BuddyLost(Message, frozen=True):
    """The node whose sidecar server is at `address` is lost. Whoever waits for its acknowledgement must not: behind a
    cut link nothing ever comes, not even the end of the connection."""

    address: str


CoordinatorToWorker: TypeAlias = (
    Plan | Assign | Rule | Release | Resume | InjectAck | Warm | Look | Explain | BuddyLost | Bye
)

# --- supervisor <-> coordinator ---------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First frame of a supervisor. slots: how many ranks this node can hold."""

    protocol: int
    node: int
    host: str
    pid: int
    slots: int
    sidecars: str
    """host:port of this node's sidecar server"""
    name: str = ""
    """as Slurm calls the node; "" outside Slurm"""
    block: str = ""
    vital: str = ""
    sick: str = ""
    """these three: see tpwrap.core.arrangement.Site"""


class Leaving(Message, frozen=True):
    """The supervisor was told by a signal that the job shall end (Slurm tells every process of a job at once)."""

    signal: str


class Heartbeat(Message, frozen=True):
    pass


class WorkerExited(Message, frozen=True):
    """A worker process ended (pidfd). returncode: as in subprocess, negative for a signal."""

    slot: int
    worker: str
    returncode: int
    hung: bool = False
    """True when the supervisor killed it because it was stopped or silent for too long"""


class SlotFailed(Message, frozen=True):
    """This slot brings no worker up: the supervisor has tried several times and tries no more.

    how: in words. returncode: of the last attempt, as in subprocess.
    """

    slot: int
    how: str
    returncode: int


class FromWorker(Message, frozen=True):
    slot: int
    worker: str
    message: WorkerMessage


class ToWorker(Message, frozen=True):
    worker: str
    message: CoordinatorToWorker


class Kill(Message, frozen=True):
    """Fence: SIGKILL this worker now."""

    worker: str


class Shutdown(Message, frozen=True):
    """End every worker and leave.

    exit_code: of the job, if it has ended; None: this node alone was given up.
    """

    reason: str
    exit_code: int | None = None


SupervisorMessage: TypeAlias = Hello | Leaving | Heartbeat | WorkerExited | SlotFailed | FromWorker
CoordinatorMessage: TypeAlias = ToWorker | Kill | Shutdown | Heartbeat

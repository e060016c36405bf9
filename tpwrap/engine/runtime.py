"""The engine of one worker: what it is made of, and how messages reach the parts."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_post_hook

from tpwrap.control.messages import (
    Assign,
    BuddyLost,
    Bye,
    CommError,
    CoordinatorToWorker,
    Explain,
    InjectAck,
    Look,
    Notice,
    Plan,
    Progress,
    Release,
    Resume,
    Rule,
    SetupDone,
    WorkerMessage,
)
from tpwrap.control.sidecars import SETUP_STEP
from tpwrap.core.timeouts import Timeouts
from tpwrap.engine import _native, communicators, ddp, scalers, steps
from tpwrap.engine.communicators import Aborted, Communicators, Poisoned
from tpwrap.engine.digests import Digests
from tpwrap.engine.gate import CommitGate
from tpwrap.engine.injector import Injector
from tpwrap.engine.link import Link
from tpwrap.engine.recovery import Recovery
from tpwrap.engine.redo import Redo
from tpwrap.engine.sidecar import Publisher
from tpwrap.engine.transfer import StateServer
from tpwrap.engine.votes import Votes
from tpwrap.engine.whereabouts import Lookout

if TYPE_CHECKING:
    from tpwrap.engine.script.script import Script
    from tpwrap.engine.steps import Steps

_current: Runtime | None = None
_PROGRESS_PERIOD = 0.25
_LAYOUT_STEPS = 64
"""steps in which DDP's buckets are expected to get their final layout"""
_RECORD_BYTES = 64 << 20
"""of set-up results; what does not fit (initial parameters, as a rule) comes from a replica anyway"""


def current() -> Runtime | None:
    """The engine of this process; None without tpwrap."""
    return _current


class Runtime:
    """Everything the engine holds in this worker, once it has a rank.

    live: this worker takes part in collectives for real. A newcomer is not live before its point of entry.
    """

    def __init__(self, link: Link, state_server: StateServer, key: bytes, timeouts: Timeouts, assign: Assign) -> None:
        global _current
        self.rank = assign.rank
        self.generation = assign.generation
        self.entry = assign.plan
        """the plan with which this worker entered a running job"""
        self.assigned_at = time.monotonic()
        self.live = assign.plan is None or assign.plan.step == SETUP_STEP
        self.key = key
        self.timeouts = timeouts
        self.state_server = state_server
        self.gate = CommitGate()
        self.budget = int(float(os.environ.get("TORCHPASS_REPLAY_BUDGET_MB", "2048")) * (1 << 20))
        """bytes of inputs of collectives that may be kept for replay"""
        self.journal = _native.Journal(assign.world_size, self.budget, _RECORD_BYTES)
        self.communicators = Communicators(self.journal, assign.store, timeouts.ready)
        self._lookout = Lookout(self.communicators, assign.world_size)
        self.publisher = Publisher(self.journal, key, assign.rank, timeouts.release)
        self.injector = Injector(assign.faults, self.send)
        self.world_size = assign.world_size
        self.steps: Steps | Script | None = None
        self.script: Script | None = None
        """where the script is taken as it is"""
        self.groups_at_setup = 0
        self.bucket_phase_done = False
        self.layout = ""
        self.unprotected = ""
        """why a failure could not be healed, where that is known"""
        self._link = link
        self.changed = threading.Condition()
        """notified at every change of what this worker has been told, and of what it tells itself"""
        self.votes = Votes(self, None if assign.plan is None else assign.plan.votes)
        self.redo = Redo(self)
        self.digests = Digests(self)
        self._plan = assign.plan
        self._resumed = -1
        self._finished = threading.Event()
        self._last_progress = 0.0
        self._modules_before = set(sys.modules)
        self._recovery = Recovery(self)
        self.publisher.connect(assign.generation, assign.buddies[assign.rank])
        if self.live:
            self.communicators.begin(assign.generation)
            self.journal.go_live()
        else:
            self.communicators.offline = True
            self.journal.go_offline()
        communicators.install(self.communicators)
        ddp.install(lambda: self.communicators.offline and self.script is None)
        steps.install_backward_hook(self)
        scalers.install(lambda: self.steps.will_update if isinstance(self.steps, steps.Steps) else None)
        register_optimizer_step_post_hook(self._after_update)
        threading.Thread(target=self._watch_failures, name="torchpass-watch", daemon=True).start()
        _current = self

    @property
    def step(self) -> int:
        return SETUP_STEP if self.steps is None else self.steps.step

    @property
    def settled_step(self) -> int:
        """`step`, except that step 0 counts only once every rank is known to have reached it: before that, a rank may
        have died in its set-up, and nobody could enter at step 0 in its place."""
        if self.step == 0 and self.journal.stats()["common_step"] < 0:
            return SETUP_STEP
        return self.step

    def attach(self, steps: Steps | Script) -> None:
        """What knows this training's steps from now on. Raises RuntimeError at a second session."""
        if self.script is not None and self.steps is self.script:
            if not self.script.detach():
                raise RuntimeError(
                    "tpwrap.session() comes after the training has begun; "
                    "call it before the first batch is taken"
                )
            self.without_script()
        if self.steps is not None:
            raise RuntimeError("tpwrap.session() was called twice; one session serves the whole script")
        self.steps = steps

    def without_script(self) -> None:
        """The script is not taken as it is: it has asked for the two-line API."""
        if self.script is not None:
            self.script.detach()
        self.script = self.steps = None

    def _after_update(self, *_: object) -> None:
        """After every update of every optimizer: does anybody protect this training?"""
        if self.script is not None and self.steps is self.script:
            self.script.uncounted_update()
        if self.steps is None:
            self.unprotect(
                "the script trains without tpwrap.session(), so there is nothing to enter a replacement at; "
                "add `tp = tpwrap.session(model=…, optimizer=…)` and `for batch in tp.batches(loader):`"
            )

    def unprotect(self, reason: str, told: bool = False) -> None:
        """A failure could not be healed from here on; the training goes on. The first reason stands. told: the user
        knows already."""
        if not self.unprotected:
            self.unprotected = reason
            self.journal.set_budget(0)
            if not told:
                self.send(Notice("warning", f"not protected: {reason}"))

    # --- to the coordinator -----------------------------------------------------------------------

    def send(self, message: WorkerMessage) -> None:
        self._link.send(message)

    def setup_done(self, shard: str) -> None:
        """The first step boundary is passed: the script has made what it trains with."""
        self.groups_at_setup = len(self.communicators.all)
        self.send(SetupDone(self.generation, sorted(_importable(set(sys.modules) - self._modules_before)), shard))

    @property
    def poisoned(self) -> bool:
        """This pass will be redone, and what it computes is garbage."""
        return self.communicators.poisoned

    def raise_if_poisoned(self) -> None:
        """End such a pass here."""
        if self.poisoned:
            raise Poisoned

    def progress(self, step: int) -> None:
        """Runs in the training thread at every commit."""
        self.digests.after_update(step)
        if not self.layout and step <= _LAYOUT_STEPS:
            self.layout = ddp.layout()
        now = time.monotonic()
        if now - self._last_progress >= _PROGRESS_PERIOD:
            self._last_progress = now
            self.send(Progress(step))

    # --- from the coordinator (link thread) -------------------------------------------------------

    def handle(self, message: CoordinatorToWorker) -> None:
        if isinstance(message, Release):
            self._release(message)
        elif isinstance(message, Plan):
            if message.generation == self.generation:
                with self.changed:
                    self._plan = message
                    self.changed.notify_all()
                if self.live:
                    self._recovery.post(message)
        elif isinstance(message, Resume):
            with self.changed:
                self._resumed = message.generation
                self.changed.notify_all()
            if self.live:
                self._recovery.post(message)
        elif isinstance(message, Rule):
            self.votes.told(message.votes)
        elif isinstance(message, InjectAck):
            self.injector.answer(message)
        elif isinstance(message, BuddyLost):
            self.publisher.drop(message.address)
        elif isinstance(message, Look):
            self.send(self._lookout.look(self.generation, self.step))
        elif isinstance(message, Explain):
            self.digests.explain(message.step)
        elif isinstance(message, Bye):
            self._finished.set()

    def _release(self, message: Release) -> None:
        if message.generation <= self.generation:
            return
        self.gate.close()
        self.journal.suspend()
        self.state_server.withdraw(message.generation)
        with self.changed:
            self.generation = message.generation
            self._plan = None
            self.changed.notify_all()
        if not self.communicators.abort(self.timeouts.release):
            print("torchpass: communicators could not be aborted; this worker gives up", file=sys.stderr)
            os._exit(70)
        if self.live:
            self._recovery.post(message)

    def _watch_failures(self) -> None:
        while True:
            error = self.journal.wait_failure(3600.0)
            if error:
                self.send(CommError(self.generation, error.splitlines()[0][:300]))

    # --- waiting (training thread of a newcomer, recovery thread) ---------------------------------

    def wait_plan(self) -> Plan:
        with self.changed:
            self.changed.wait_for(lambda: self._plan is not None)
            assert self._plan is not None
            return self._plan

    def wait_resume(self, generation: int) -> None:
        """Raises Aborted when the generation is given up first."""
        with self.changed:
            self.changed.wait_for(lambda: self._resumed >= generation or self.generation != generation)
            if self.generation != generation:
                raise Aborted("the generation was given up before it went live")

    def wait_new_generation(self, generation: int) -> bool:
        """Whether `generation` is given up within the time in which its failure must become known."""
        with self.changed:
            return self.changed.wait_for(lambda: self.generation > generation, self.timeouts.ready)

    def enter_live(self) -> None:
        """A newcomer's last step: from here on its collectives are real and it is a survivor of later failures."""
        self.groups_at_setup = len(self.communicators.all)
        self.communicators.offline = False
        with self.changed:
            self.live = True
            overtaken = self.generation
        self.journal.go_live()
        if overtaken == self._resumed:
            self.gate.open()
        else:
            # A new failure between Resume and here: we were told to release while we did not count as live yet.
            self._recovery.post(Release(overtaken, "failure while entering"))
            self.journal.suspend()
        self.layout = ddp.layout()

    def finish(self, step: int) -> None:
        from tpwrap.control.messages import Finished

        self.send(Finished(step))
        self._finished.wait()
        self._link.closing = True

    def wait_for_end(self) -> None:
        """The job is about to be ended for a reason that was sent: do nothing more until then."""
        threading.Event().wait(self.timeouts.ready)


def _importable(names: set[str]) -> set[str]:
    """Those modules that a warm process can import beforehand: installed ones, not the user's own scripts."""
    found = set()
    for name in names:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file and ("site-packages" in file or "dist-packages" in file) and getattr(module, "__spec__", None):
            found.add(name)
    return found

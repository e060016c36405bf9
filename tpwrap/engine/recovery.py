"""A survivor's side of a recovery: release, rebuild, verify, resume. Runs in a thread of its own.

The training thread needs no part in it: it is blocked in a collective whose future is incomplete, or runs on until its
next collective or the commit gate.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from tpwrap.control.messages import Notice, Plan, Ready, Release, Released, Resume, Resumed, Unprotected
from tpwrap.control.sidecars import SETUP_STEP
from tpwrap.core.endings import OVER_BUDGET
from tpwrap.engine.communicators import Aborted
from tpwrap.engine.state import StateError
from tpwrap.engine.transfer import Offer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpwrap.engine.runtime import Runtime


_GLANCE = 0.001
"""seconds between looks for an update that is about to be applied"""


class Recovery:
    """Handles Release, Plan and Resume in order. A message of a generation that is no longer current is skipped."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._queue: queue.SimpleQueue[Release | Plan | Resume] = queue.SimpleQueue()
        self._plan: Plan | None = None
        threading.Thread(target=self._run, name="torchpass-recovery", daemon=True).start()

    def post(self, message: Release | Plan | Resume) -> None:
        self._queue.put(message)

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            if message.generation != self._runtime.generation:
                continue
            try:
                if isinstance(message, Release):
                    self._release(message)
                elif isinstance(message, Plan):
                    self._rebuild(message)
                else:
                    self._resume(message)
            except BaseException as error:
                if isinstance(error, (Aborted, OSError, RuntimeError)) and self._overtaken(message.generation):
                    continue  # given up in the middle of it: the next Release is in the queue
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(70)  # a worker that cannot recover counts as failed itself, and is replaced

    def _overtaken(self, generation: int) -> bool:
        """Whether this generation has been (or, after a communication error, shortly is) given up."""
        return self._runtime.wait_new_generation(generation)

    def _release(self, message: Release) -> None:
        runtime = self._runtime
        began = time.monotonic()
        runtime.injector.at("recovery", runtime.step, "release")
        runtime.gate.settle()
        # Before buffers are used again: an inner operation that is still running may write into them. Seen once in
        # hundreds of recoveries: one of gloo's operations does not end although all its connections are shut. Nothing
        # can arrive for it any more, so after a second try it is left behind with its backend, which is kept, because
        # destroying it would wait for the operation.
        patience = runtime.timeouts.release / 5
        if not runtime.journal.drain(patience):
            runtime.communicators.cut_again()
            if not runtime.journal.drain(patience):
                # Not printed: the script's own lines must be those of a run without failures.
                runtime.send(Notice("info", "an operation of a given-up communicator did not end; it is left behind"))
                runtime.communicators.leave_behind()
        runtime.communicators.drop()
        step = runtime.settled_step
        # Where nothing is kept for a reason that is known, the plan comes to us and we say it.
        replay_from = SETUP_STEP if runtime.unprotected else runtime.journal.stats()["lost_step"] + 1
        voted = runtime.votes.passed(step)
        runtime.send(Released(message.generation, step, time.monotonic() - began, voted, replay_from))

    def _rebuild(self, plan: Plan) -> None:
        runtime = self._runtime
        self._plan = plan
        steps = runtime.steps
        kept = runtime.journal.redoable if plan.way == "redo" else runtime.journal.replayable
        if not kept(plan.step) or (plan.way == "redo" and not runtime.redo.possible):
            runtime.send(Unprotected(runtime.unprotected or OVER_BUDGET))
            return

        def given_up() -> bool:
            return runtime.generation != plan.generation

        runtime.communicators.begin(plan.generation)
        runtime.publisher.connect(plan.generation, plan.buddies[runtime.rank], given_up)
        runtime.votes.follow(plan)
        if plan.step == SETUP_STEP:
            return  # the newcomer runs its script live from the start and builds the groups as it comes to them
        if plan.votes and runtime.step < plan.step:
            self._roll_forward(plan.step, given_up)
        if plan.way == "redo":
            runtime.redo.poison()
        digest = ""
        if steps is not None and steps.step == plan.step:
            step = plan.step
            try:
                state = steps.state_at(step)
            except StateError as error:
                runtime.send(Unprotected(str(error)))
                return
            offer = Offer(
                plan.generation,
                step,
                state,
                steps.scalars[step],
                steps.readings_before(step),
                lambda: runtime.injector.at("recovery", step, "restore"),
            )
            runtime.state_server.offer(offer)
            digest = runtime.digests.keep(step, offer.digests(), offer.scalars)
        began = time.monotonic()
        runtime.injector.at("recovery", runtime.step, "rebuild")
        at_setup = runtime.communicators.all[: runtime.groups_at_setup]
        later = runtime.communicators.all[runtime.groups_at_setup :]
        # Groups that the script has made in the middle of training: the newcomer makes them when it gets there.
        runtime.communicators.rebuild_apart(later)
        runtime.communicators.rebuild(at_setup)
        rebuilt = time.monotonic()
        runtime.injector.at("recovery", runtime.step, "verify")
        runtime.publisher.wait(runtime.timeouts.release, given_up)
        runtime.send(
            Ready(
                plan.generation,
                runtime.step,
                digest,
                runtime.layout,
                {"rebuild": rebuilt - began, "verify": time.monotonic() - rebuilt},
            )
        )

    def _roll_forward(self, step: int, given_up: Callable[[], bool]) -> None:
        """Let the one update through that the plan has spoken for. Raises Aborted."""
        runtime = self._runtime
        runtime.gate.open()
        deadline = time.monotonic() + runtime.timeouts.ready
        while runtime.step < step and not given_up():
            if time.monotonic() > deadline:
                raise TimeoutError(f"update {step} was to be applied at once, and was not")
            time.sleep(_GLANCE)
        runtime.gate.close()
        runtime.gate.settle()
        if runtime.step < step:
            raise Aborted("the generation was given up while rolling forward")

    def _resume(self, message: Resume) -> None:
        runtime, plan = self._runtime, self._plan
        if plan is None or plan.generation != message.generation:
            return
        began = time.monotonic()
        runtime.injector.at("recovery", runtime.step, "resume")
        runtime.state_server.withdraw(message.generation + 1)
        runtime.redo.await_end_of_pass(lambda: runtime.generation != message.generation)
        runtime.journal.replay(plan.step)
        runtime.redo.begin_again()
        runtime.gate.open()
        if plan.step == SETUP_STEP:
            runtime.communicators.rebuild(runtime.communicators.all)  # each group replays as soon as it stands
        if runtime.journal.wait_replayed(runtime.timeouts.ready):
            replayed = runtime.journal.stats()["replayed"]
            runtime.send(Resumed(message.generation, {"replay": time.monotonic() - began}, replayed))

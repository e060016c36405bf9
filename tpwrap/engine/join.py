"""How a newcomer becomes live: fetch its sidecar, copy a replica, build communicators, verify, wait for the word."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tpwrap.control.messages import Plan, Ready, Resumed, Unprotected
from tpwrap.control.sidecars import SETUP_STEP
from tpwrap.engine import ddp, encoding, sidecar, transfer
from tpwrap.engine.communicators import Aborted
from tpwrap.engine.script.memory import Memory
from tpwrap.engine.sidecar import Sidecar
from tpwrap.engine.state import StateError

if TYPE_CHECKING:
    from tpwrap.engine.runtime import Runtime
    from tpwrap.engine.script.script import Script
    from tpwrap.engine.steps import Steps


def encode_setup(runtime: Runtime) -> bytes:
    """The set-up record: the results of the collectives before the first step and, of a script as it is, the random
    state at its top."""
    start = None if runtime.script is None else runtime.script.start
    return encoding.encode((runtime.communicators.record(), start))


def prepare(runtime: Runtime, plan: Plan) -> None:
    """A newcomer, before its script starts: what of the failed rank's set-up and way it will need."""
    record = _fetch(runtime, plan, SETUP_STEP)
    collectives, start = encoding.decode(record)
    # A script as it is does not run its operations on its way: those of its first step would answer later ones.
    runtime.communicators.serve([(setup, first if start is None else []) for setup, first in collectives])
    runtime.publisher.adopt(SETUP_STEP, record)
    if start is None:
        runtime.without_script()
    elif runtime.script is not None:
        runtime.script.follow()
        runtime.script.begin_as(start)


def sidecar_of(runtime: Runtime, plan: Plan) -> Sidecar:
    """The failed rank's sidecar for the plan's step."""
    return Sidecar.decode(_fetch(runtime, plan, plan.step))


def memory_of(runtime: Runtime, plan: Plan) -> tuple[bytes, list[bytes]]:
    """The failed rank's sidecar for the plan's step, and the closed segments of its tape, where its script is as it
    is. Raises Aborted when the plan is given up meanwhile."""
    keepers, rank, patience = plan.keepers[runtime.rank], runtime.rank, runtime.timeouts.release

    def given_up() -> bool:
        return runtime.generation != plan.generation

    try:
        blob = sidecar.fetch_covering(keepers, runtime.key, rank, plan.step, patience, given_up)
        memory = Memory.decode(blob)
        # A keeper that was cut off may hold segments of a lost worker's tape: only those with this sidecar are asked.
        segments = sidecar.fetch_segments(
            keepers, runtime.key, rank, memory.tape.segments, patience, given_up, beside=memory.step
        )
    except sidecar.SidecarLost as lost:
        raise _give_up(runtime, str(lost)) from lost
    return blob, segments


def readings_of(runtime: Runtime, plan: Plan, rank: int) -> bytes:
    """What the script of a survivor has read just before the plan's step. Raises OSError."""
    return transfer.readings(
        plan.members[rank],
        runtime.key,
        plan.generation,
        plan.step,
        runtime.timeouts.release,
        lambda: runtime.generation != plan.generation,
    )


def fetch(runtime: Runtime, plan: Plan) -> bytes:
    """The failed rank's sidecar for the plan's step, encoded."""
    return _fetch(runtime, plan, plan.step)


def _fetch(runtime: Runtime, plan: Plan, step: int) -> bytes:
    try:
        return sidecar.fetch(plan.keepers[runtime.rank], runtime.key, runtime.rank, step, runtime.timeouts.release)
    except sidecar.SidecarLost as lost:
        raise _give_up(runtime, str(lost)) from lost


def join(runtime: Runtime, steps: Steps | Script, step: int) -> bool:
    """Become live right after update `step`. False when the survivors are further: run one more offline body.

    Starts over with each new plan: a failure during a recovery gives this newcomer another generation, other sources,
    perhaps a later step.
    """
    while True:
        plan = runtime.wait_plan()
        if step < plan.step:
            return False
        try:
            blob, scalars = _enter(runtime, steps, plan)
        except (Aborted, OSError, RuntimeError) as error:
            if isinstance(error, StateError):
                raise _give_up(runtime, str(error)) from error
            # A source or a member is gone. Whoever noticed first tells the coordinator; the next plan follows.
            if not runtime.wait_new_generation(plan.generation):
                raise
            runtime.communicators.drop()
            continue
        began = time.monotonic()
        muted = steps.entered(plan.step, blob, scalars)
        runtime.enter_live()
        runtime.send(Resumed(plan.generation, {"enter": time.monotonic() - began}, 0, muted))
        return True


def _enter(runtime: Runtime, steps: Steps | Script, plan: Plan) -> tuple[bytes, bytes]:
    def given_up() -> bool:
        return runtime.generation != plan.generation

    clock = _Stages()
    runtime.injector.at("recovery", plan.step, "restore")
    # From the assignment to the point of entry: imports, set-up, the offline body.
    script = time.monotonic() - runtime.assigned_at

    if not runtime.bucket_phase_done and runtime.script is None:
        ddp.finish_bucket_phase(plan.step)
        runtime.bucket_phase_done = True
    if any(communicator.group.served_mismatches for communicator in runtime.communicators.all):
        raise StateError("the script's set-up ran other collectives here than it did in the failed rank")
    blob = steps.blob(plan)
    inventory, _ = transfer.restore(
        steps.state,
        [plan.members[rank] for rank in plan.sources[runtime.rank]],
        runtime.key,
        plan.generation,
        plan.step,
        runtime.timeouts.release,
        given_up,
    )
    clock.lap("restore")
    runtime.communicators.begin(plan.generation)
    runtime.votes.follow(plan)
    runtime.communicators.rebuild(runtime.communicators.all)
    clock.lap("rebuild")
    runtime.publisher.adopt(plan.step, blob)
    runtime.publisher.connect(plan.generation, plan.buddies[runtime.rank], given_up)
    runtime.publisher.wait(runtime.timeouts.release, given_up)
    runtime.injector.at("recovery", plan.step, "verify")
    # The digests with which `restore` ended are still those of our state: this thread is the only one that works on it,
    # and since then it has built communicators, whose probes run on tensors of their own; the script's collectives have
    # all been answered offline, so no operation is left that could write.
    digest = runtime.digests.keep(plan.step, inventory.digests, inventory.scalars)
    clock.lap("verify")
    steps.announce()
    runtime.send(Ready(plan.generation, plan.step, digest, ddp.layout(), {"script": script, **clock.laps}))
    runtime.wait_resume(plan.generation)
    runtime.injector.at("recovery", plan.step, "resume")
    return blob, inventory.scalars


def _give_up(runtime: Runtime, reason: str) -> RuntimeError:
    runtime.send(Unprotected(reason))
    runtime.wait_for_end()
    return RuntimeError(reason)


class _Stages:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now

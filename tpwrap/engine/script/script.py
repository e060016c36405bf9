"""A training whose script knows nothing of us: its steps as the engine sees them, and a newcomer's way to its step.

One update (a call of any optimizer's step() that goes through) is one step. A newcomer runs the whole script from its
top, with everything heavy stubbed (`regions`, `passes`) and every value that the script reads from tensors, other
ranks, files or clocks answered from the failed rank's tape. So it comes to the last backward pass before its entry with
the same variables; there it is given what the tape does not hold (random state, running sums and other tensors in
variables), at the end of that update what replicas hold (weights, optimizer state), and is live.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from tpwrap import adapters
from tpwrap.adapters.places import Places
from tpwrap.control.messages import Muted, Notice, Plan, Unprotected
from tpwrap.control.sidecars import SETUP_STEP
from tpwrap.engine import ddp, join, randomness, shards
from tpwrap.engine.buffers import LocalBuffers
from tpwrap.engine.communicators import Aborted
from tpwrap.engine.scalars import optimized
from tpwrap.engine.script import crossings, shapes, trace
from tpwrap.engine.script.boundary import Boundary, Mode, where
from tpwrap.engine.script.memory import Memory
from tpwrap.engine.script.outputs import Outputs
from tpwrap.engine.script.passes import Passes
from tpwrap.engine.script.patches import Patches
from tpwrap.engine.script.protection import WATCHED, Watch
from tpwrap.engine.script.readings import Readings
from tpwrap.engine.script.regions import Regions, Sample
from tpwrap.engine.script.slow import Moved, some
from tpwrap.engine.script.tape import Diverged, Tape
from tpwrap.engine.script.variables import Variables
from tpwrap.engine.script.window import Window
from tpwrap.engine.state import ReplicaState, combined

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tpwrap.engine.runtime import Runtime

_LATE_CHECKS = 20
"""updates in which the engine looks whether the optimizer itself draws random numbers"""


_AHEAD = 3
"""updates after its entry at which a newcomer has done all that the failed rank can have done"""


class _Extent(NamedTuple):
    """What there was at the end of an update."""

    models: int
    optimizers: int
    slow: list[str]
    """names of groups"""
    waiting: list[int]
    """optimizers that are to follow without another backward pass"""


class Script:
    """The engine's side of an unmodified script; what `Steps` is to the two-line API."""

    def __init__(self, runtime: Runtime) -> None:
        self.scalars: dict[int, bytes] = {}
        """encoded scalars as of the newest two updates"""
        self.in_scaler = False
        self.sharded = False
        """ranks hold different pieces of a model"""
        self._updating = False
        self.tape = Tape()
        self.boundary = Boundary(self.tape, self._give_up)
        self.runtime = runtime
        table = shapes.Table()
        self.passes = Passes(self.boundary, table)
        self.regions = Regions(self.boundary, table, self)
        self.variables = Variables(self.boundary, self.regions, self.passes)
        self.window = Window(runtime, self.boundary, self.regions, self.variables)
        self.watch = Watch(self)
        self._begun = False
        self._applied = 0
        self._backwards = 0
        """backward passes begun"""
        self._buffers: list[LocalBuffers] = []
        """of each model, in the order of their first call"""
        self._parameters: list[dict[str, torch.nn.Parameter]] = []
        """of each model, from before its first forward pass"""
        self._losses: list[torch.Tensor] = []
        self._published = False
        """in this step"""
        self._extent: dict[int, _Extent] = {}
        """by step, at the end of that update"""
        self._samples: dict[int, list[Sample]] = {}
        """by step: a few elements of the weights"""
        self._graded: frozenset[int] = frozenset()
        """a newcomer's optimizers whose gradients came from replicas"""
        self._entry_backwards = -1
        self._made_state: dict[int, int] = {}
        """by optimizer: gradients there were when a newcomer had it make its state"""
        self._memory: Memory | None = None
        """a newcomer's: what it is to become"""
        self._target = 0
        self._start = randomness.capture()
        """random state at the top of the script"""
        self._entry = 0
        """the update at which this newcomer entered"""
        self.boundary.begin = self._begin
        if not runtime.live:
            self.boundary.mode = Mode.FORWARD
        self.outputs = Outputs(self._ask_of_output, self.boundary.aside, os.environ.get("TORCHPASS_RUN_DIR"))
        self.readings = Readings(self.boundary, self._give_up)
        self.outputs.on_read = self.readings.opening
        again = runtime.live and runtime.entry is not None
        self.outputs.install(live=runtime.live and not trace.rehearsing(), again=again)
        if again:
            runtime.send(Muted(0, []))
        self._trace = trace.Trace.begin(runtime.rank, session=False)
        if self._trace is not None:
            self.passes.on_batch = self._trace.batch
        crossings.install(self.boundary, self.watch.written_by_descriptor)
        self.passes.install()
        self.regions.install()
        self.places = Places(self)
        adapters.install(self.places, Patches().when_imported)
        runtime.attach(self)
        runtime.injector.at("setup", SETUP_STEP)

    def detach(self) -> bool:
        """The script asks for the two-line API. False if its training has begun without it; a model may have been
        called to see what comes out."""
        if self._backwards or self._applied:
            return False
        self.boundary.mode = Mode.OFF
        if not trace.rehearsing():
            self.outputs.uninstall()
        return True

    @property
    def step(self) -> int:
        """Updates applied by this rank, -1 before the training begins."""
        return self._applied if self._begun else SETUP_STEP

    @property
    def start(self) -> list[Any]:
        """Random state at the top of the script, for the set-up record."""
        return list(self._start)

    def state_at(self, step: int) -> ReplicaState:
        """What replicas hold at the end of update `step`, of what the script had made by then. Raises Moved."""
        extent = self._extent.get(step) or self._extent_now()
        if not all(torch.equal(elements, some(weight)) for weight, elements in self._samples.get(step, [])):
            raise Moved("the weights were changed after the update by something else than an optimizer")
        return self._state(extent, self.variables.slow.at(step, extent.slow))

    @property
    def state(self) -> ReplicaState:
        """What this rank holds now; a newcomer's is written into."""
        extent = self._extent_now()
        return self._state(extent, self.variables.slow.mine(extent.slow))

    def digest_of_weights(self) -> str:
        """Of what is trained, and the optimizers' state: equal on all ranks that train together."""
        return combined(self._state(self._extent_now()._replace(waiting=[]), {}).digests(), b"")

    def _shard(self) -> str:
        # Of what is trained: ranks may well call different models beside.
        optimizers = self.regions.optimizers
        named = ((f"{i}/{place}", p) for i, one in enumerate(optimizers) for place, p in optimized(one))
        return shards.shard(named, optimizers)

    def _extent_now(self) -> _Extent:
        regions = self.regions
        return _Extent(len(regions.models), len(regions.optimizers), self.variables.slow.names(), regions.waiting())

    def _state(self, extent: _Extent, slow: dict[str, torch.Tensor]) -> ReplicaState:
        regions = self.regions
        return ReplicaState.of(
            {f"model{i}": one for i, one in enumerate(regions.models[: extent.models]) if regions.trained(one)},
            {f"optimizer{i}": one for i, one in enumerate(self.regions.optimizers[: extent.optimizers])},
            {},
            lambda: slow | self._gradients(extent),
            {f"model{i}": self._parameters[i] for i, _ in enumerate(regions.models[: extent.models])},
        )

    def _gradients(self, extent: _Extent) -> dict[str, torch.Tensor]:
        """Of parameters that further optimizers are about to update without another backward pass."""
        return {
            f"gradient{i}.{place}": parameter.grad
            for i in extent.waiting
            for place, parameter in optimized(self.regions.optimizers[i])
            if parameter.grad is not None
        }

    def at(self, phase: str) -> None:
        """Fire an injected fault that is due here."""
        if self._begun and self.boundary.mode is Mode.LIVE:
            self.runtime.injector.at(phase, self._applied)

    # --- the way in -------------------------------------------------------------------------------

    def follow(self) -> None:
        """A newcomer: learn the way to the step of the newest plan. Survivors may go on by a step until it is there."""
        while True:
            plan = self.runtime.wait_plan()
            try:
                blob, segments = join.memory_of(self.runtime, plan)
                break
            except Aborted:
                continue
        self._memory = memory = Memory.decode(blob)
        self._target = plan.step
        self.tape.load(segments, memory.tape)
        self.runtime.publisher.adopt_segments(segments)
        self.boundary.load_draws()
        self.readings.load([value for kind, value in self.tape.asides if kind == "file"])
        self.boundary.mode = Mode.FORWARD

    def blob(self, plan: Plan) -> bytes:
        """The sidecar with which a newcomer enters by this plan."""
        return join.memory_of(self.runtime, plan)[0]

    def begin_as(self, start: list[Any]) -> None:
        """A newcomer, before the script starts: random state as the failed rank had it there."""
        self._start = randomness.State._make(start)
        randomness.restore(self._start)
        self.boundary.settle_draws()

    def _begin(self) -> None:
        """The first region of the training: set-up is over."""
        runtime = self.runtime
        if not dist.is_initialized() and runtime.world_size > 1:
            self.boundary.begin = self._begin
            return
        if self.boundary.mode is Mode.FORWARD:
            self._begun = True
            if self._target == 0 and not join.join(runtime, self, 0):
                self.follow()
            return
        runtime.publisher.publish(SETUP_STEP, join.encode_setup(runtime))
        self._publish(0)
        self.scalars[0] = self.state.scalars()
        self._extent[0] = self._extent_now()
        with runtime.gate:  # a recovery must see set-up or step 0, nothing in between
            self._begun = True
            runtime.journal.step = 0
        runtime.setup_done(self._shard())
        self.boundary.outside_seconds = 0.0
        self._begin_step(0)

    # --- backward ---------------------------------------------------------------------------------

    def on_backward(self, roots: list[torch.Tensor]) -> None:
        """The two-line API's hook; `before_backward` does it here."""

    def before_backward(self, roots: list[torch.Tensor]) -> bool:
        """At the start of every backward pass of the script. Returns whether it is to be run."""
        self._backwards += 1
        self.regions.no_updates()
        self.watch.end()
        if self.boundary.mode is Mode.LIVE:
            if self._begun and self.watch.is_due():
                self.watch.report()
            if self._trace is not None:
                for root in roots:
                    self._trace.loss(root)
            self._losses += [root.detach().clone() for root in _small(roots)]
            if self._begun and ddp.will_synchronize():
                self._publish(self._applied + 1)
                if self._applied in WATCHED:
                    self.watch.begin_window(_small(roots))
            return True
        real, self.regions.real = self.regions.real, False
        return real

    def after_stubbed_backward(self, roots: list[torch.Tensor]) -> None:
        """A newcomer, at the end of every backward pass on its way."""
        memory = self._memory
        if memory is not None and self._backwards == memory.backwards:
            self._become(memory, _small(roots))

    def _publish(self, step: int) -> None:
        runtime = self.runtime
        end, closed = self.tape.seal()
        if closed is not None:
            runtime.publisher.publish_segment(end.segments - 1, closed)
        variables = self.variables.now()
        slow = self.variables.sort_out(variables.tensors)
        memory = Memory(
            step,
            self._backwards,
            randomness.capture(),
            end,
            self._losses,
            [one.changed() for one in self._buffers],
            variables.tensors,
            {path: of for path, of in variables.aliases.items() if of in variables.tensors},
            variables.scalars,
            slow,
            self.variables.lost,
            self.passes.states(),
            self.passes.own_generators(),
        )
        blob = memory.encode()
        runtime.publisher.publish(step, blob)
        self._published = True
        self.watch.sidecar_bytes = len(blob)

    def announce(self) -> None:
        """A newcomer is about to report that it is ready: its supervisor is to know what it has not printed."""
        muted = self.outputs.muted()
        self.runtime.send(Muted(muted.lines, muted.last))

    def _become(self, memory: Memory, roots: list[torch.Tensor]) -> None:
        """A newcomer at its last backward pass: take over what only the failed rank knew."""
        boundary = self.boundary
        if self.tape.left:
            boundary.fail(f"{self.tape.left} recorded values were not asked for on the way to update {self._target}")
        own = self.variables.take(memory)
        for root, loss in zip(reversed(roots), reversed(memory.losses), strict=False):
            if root.shape == loss.shape:
                root.data.copy_(loss)
                own.append(root)
        if len(memory.buffers) != len(self._buffers):
            boundary.fail(f"{len(self._buffers)} models were called here, {len(memory.buffers)} by the failed rank")
        for buffers, values in zip(self._buffers, memory.buffers, strict=True):
            buffers.restore(values)
        odd = self.passes.restore(memory.passes, memory.own)
        if odd:
            boundary.fail(f"{len(odd)} passes over loaders are not over here, but were in the failed rank")
        randomness.restore(memory.random)
        boundary.mode = Mode.WINDOW
        boundary.settle_draws()
        self.window.open_for(memory, self._target, own)

    # --- updates ----------------------------------------------------------------------------------

    def on_update(self, optimizer: Optimizer, update: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of optimizer.step()."""
        boundary, runtime = self.boundary, self.runtime
        nested = boundary.inside > 0  # in a gradient scaler's region
        if not nested:
            boundary.enter()
        try:
            if boundary.mode is not Mode.LIVE:
                return self._stubbed_update(optimizer, update)
            if any(callable(argument) for argument in (*args, *kwargs.values())):
                self.watch.closure(where(sys._getframe(2)))
                self.runtime.unprotect("optimizer.step(closure) runs backward passes inside the update")
                return update(*args, **kwargs)
            self.window.take_off()
            number = self._applied
            if not self._published and not self.regions.has_updated:
                self._publish(number + 1)
                self.watch.no_backward(where(sys._getframe(2)))
            index = self.regions.optimizers.index(optimizer)
            if self.just_entered and index not in self._graded:
                self._give_up("an optimizer follows on another one without a backward pass, for the first time")
            self.at("optimizer")
            runtime.votes.ask(False, self._shard)
            runtime.votes.before_update(number)
            before = randomness.capture() if number < _LATE_CHECKS else None
            with runtime.gate:
                result = self._update(lambda: update(*args, **kwargs))
                self.regions.updated(index)
                self._commit()
            if before is not None and before != randomness.capture():
                self.runtime.unprotect("the optimizer draws random numbers in its update")
            if number in WATCHED:
                self.watch.begin_tail()
            runtime.injector.at("commit", number)
            if self._trace is not None and self._trace.done(number + 1):
                trace.leave(runtime, number + 1)
            return result
        finally:
            if not nested:
                boundary.leave()

    def _update(self, update: Callable[[], Any]) -> Any:
        """Run it. What it calls in turn (an optimizer inside an optimizer) is a part of it, also in a scaler's step."""
        in_scaler, self.in_scaler, self._updating = self.in_scaler, False, True
        try:
            return update()
        finally:
            self.in_scaler, self._updating = in_scaler, False

    def uncounted_update(self) -> None:
        """An optimizer has updated: in a step that we count?"""
        if not self._updating and self._begun and self.boundary.mode is Mode.LIVE:
            self.watch.uncounted(where(sys._getframe()))
            self.runtime.unprotect("an optimizer updates without optimizer.step() being called by the script")

    def _commit(self) -> None:
        """The update is applied. Runs inside the commit gate."""
        step = self._applied = self._applied + 1
        self.variables.slow.commit(step)
        self.scalars[step] = self.state.scalars()
        self.scalars.pop(step - 3, None)
        self._extent[step] = self._extent_now()
        self._samples[step] = self.regions.sample()
        for kept in (self._extent, self._samples):
            kept.pop(step - 3, None)
        self.window.keep(step, self.tape.answers())
        if self._trace is not None:
            values = trace.variables(sys._getframe())
            self._trace.commit(step, self.state.digests(), self.scalars[step], values, randomness.capture())
        if step == self._entry + _AHEAD:
            self.outputs.caught_up()
        self._begin_step(step)
        self.runtime.progress(step)

    def _begin_step(self, step: int) -> None:
        self._losses = []
        self._published = False
        self.runtime.journal.step = step
        self.runtime.injector.step_begins(step, self.runtime.journal)
        if self.runtime.injector.wants("between"):
            self.boundary.next_region = lambda: self.at("between")

    def _stubbed_update(self, optimizer: Optimizer, update: Callable[..., Any]) -> None:
        """A newcomer's optimizer.step(): the place where it becomes live, if its step has come."""
        graded = sum(p.grad is not None for _, p in optimized(optimizer))
        if self._made_state.get(id(optimizer)) != graded:
            # The script may hold the optimizer's state (in a checkpoint it has put together): so it must be there, and
            # the very tensors that get the replicas' values.
            self._made_state[id(optimizer)] = graded
            self._update(update)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for the scheduler's order check
        self.regions.updated(self.regions.optimizers.index(optimizer))
        step = self._applied + 1
        if step < self._target:
            self._applied = step
            return
        if self.boundary.mode is not Mode.WINDOW:
            self.boundary.fail(f"update {step} comes before its backward pass")
        self._applied = step
        self.window.derive()
        self.window.close()
        state = randomness.capture()
        if join.join(self.runtime, self, step):
            randomness.restore(state)
            self.boundary.settle_draws()
            self.watch.begin_tail()
        else:
            self.follow()

    def entered(self, step: int, blob: bytes, scalars: bytes) -> dict[str, int]:
        """The newcomer's state is that of `step`; called by join, last thing before it goes live. Returns what it has
        left out on its way: calls by kind."""
        memory = Memory.decode(blob)
        if step == 0:
            randomness.restore(memory.random)
            self.boundary.settle_draws()
        self._memory = None
        self.tape.forget()
        self.regions.forget()
        self._entry = step
        self.boundary.mode = Mode.LIVE
        muted: dict[str, int] = {}
        if self._trace is None:
            found = self.outputs.go_live()
            muted = found.calls
            for doubt in found.doubts:
                self.runtime.send(Notice("warning", f"{doubt}: others write to it, too; lines may stand twice"))
        else:
            self._trace.entered()
        self.runtime.journal.step = step
        self.scalars = {step: scalars}
        self.variables.slow.commit(step)
        self._extent = {step: self._extent_now()}
        self._samples = {step: self.regions.sample()}
        self._graded = frozenset(self._extent[step].waiting)
        self._entry_backwards = self._backwards
        self.window.keep(step, self.tape.answers())
        self._begin_step(step)
        return muted

    def readings_before(self, step: int) -> bytes:
        """For a newcomer that enters after update `step`: what the script has read just before it."""
        return self.window.kept(step)

    @property
    def just_entered(self) -> bool:
        """Whether this newcomer's script is still in the body in which it entered."""
        return self._backwards == self._entry_backwards

    # --- helpers ----------------------------------------------------------------------------------

    def _ask_of_output(self, kind: str, compute: Callable[[], Any]) -> Any:
        """What the output layer wants to know of the failed rank's files."""
        return self.boundary.cross("f", compute, 0) if self.boundary.outside else compute()

    def model_found(self, model: torch.nn.Module) -> None:
        """A model was called for the first time."""
        if shards.sharded(model):
            self.sharded = True  # the first lines of the run say it
            reason = "the model is sharded: add the two lines of tpwrap.session (docs/sharded.md)"
            self.runtime.unprotect(reason, told=True)
        self._buffers.append(LocalBuffers(model))
        self._parameters.append(dict(model.named_parameters()))
        if self.runtime.injector.wants("backward"):
            parameters = [p for p in model.parameters() if p.requires_grad]
            if parameters:
                parameters[len(parameters) // 2].register_hook(lambda _: self.at("backward"))

    def ended(self) -> None:
        """The script has ended. A newcomer whose script ends on its way has gone another way than the failed rank."""
        if self._memory is not None and not self.runtime.live:
            self._give_up(
                f"it ended after update {self._applied}, but the failed rank was at update {self._target}: "
                "it went another way, perhaps because of a file that has changed since"
            )

    def _give_up(self, reason: str) -> NoReturn:
        script = sys.argv[0] if sys.argv else "the script"
        self.runtime.send(Unprotected(f"{script} cannot be followed to the step of the failure: {reason}"))
        self.runtime.wait_for_end()
        raise Diverged(reason)


def _small(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    return [root for root in roots if root.numel() <= 64]


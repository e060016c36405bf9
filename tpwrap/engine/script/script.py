"""A training whose script knows nothing of us: its steps as the engine sees them, and a newcomer's way to its step.

One update (a call of any optimizer's step() that goes through) is one step. A newcomer runs the whole script from its
top, with everything heavy stubbed (`regions`, `passes`) and every value that the script reads from tensors, other
ranks, files or clocks answered from the failed rank's tape. So it comes to the last backward pass before its entry with
the same variables; there it is given what the tape does not hold (random state, running sums and other tensors in
variables), at the end of that update what replicas hold (weights, optimizer state), and is live.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from tpwrap import adapters
from tpwrap.adapters.places import Places
from tpwrap.control.messages import Muted, Notice, Plan, Protection, Unprotected
from tpwrap.control.sidecars import SETUP_STEP
from tpwrap.core import lint
from tpwrap.core.lint import Facts, Finding, Large, Place
from tpwrap.engine import ddp, encoding, join, randomness
from tpwrap.engine.buffers import LocalBuffers
from tpwrap.engine.communicators import Aborted
from tpwrap.engine.scalars import optimized
from tpwrap.engine.script import crossings, facts, shapes, trace, walk
from tpwrap.engine.script.boundary import Boundary, Mode, where
from tpwrap.engine.script.memory import Memory
from tpwrap.engine.script.outputs import Outputs
from tpwrap.engine.script.passes import Passes
from tpwrap.engine.script.patches import Patches
from tpwrap.engine.script.provenance import Origin, Provenance
from tpwrap.engine.script.readings import Readings
from tpwrap.engine.script.regions import Regions
from tpwrap.engine.script.slow import Slow
from tpwrap.engine.script.tape import Diverged, Entry, Tape
from tpwrap.engine.script.walk import Known, Loose
from tpwrap.engine.state import ReplicaState, combined

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tpwrap.engine.runtime import Runtime

_LATE_CHECKS = 20
"""updates in which the engine looks whether the optimizer itself draws random numbers"""


_ROOM = 1 << 20
"""bytes of tensors in the script's variables that are sent with every step"""
_REPORTED = (0, 1, 3)
"""updates after which more is known about what is protected"""
_WATCHED = (0, 2)
"""updates in which the engine looks where values come from"""
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""names of frames, up to Python 3.11; later ones have no frame of their own"""
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
        self.tape = Tape()
        self.boundary = Boundary(self.tape, self._give_up)
        self._runtime = runtime
        table = shapes.Table()
        self.passes = Passes(self.boundary, table)
        self.regions = Regions(self.boundary, table, self)
        self._begun = False
        self._looked = 0
        """passes begun when generators were looked for"""
        self._applied = 0
        self._backwards = 0
        self._buffers: list[LocalBuffers] = []
        self._losses: list[torch.Tensor] = []
        self._published = False
        """in this step"""
        self._told_of = (0, 0, 0)
        """numbers of findings in the last report"""
        self.slow = Slow()
        self._extent: dict[int, _Extent] = {}
        """by step, at the end of that update"""
        self._large: dict[str, int] = {}
        """paths of large tensors in the script's variables at the last publication: identity"""
        self._graded: frozenset[int] = frozenset()
        """a newcomer's optimizers whose gradients came from replicas"""
        self._entry_backwards = -1
        self._made_state: dict[int, int] = {}
        """by optimizer: gradients there were when a newcomer had it make its state"""
        self._findings: dict[str, Finding] = {}
        self._lost: dict[str, int] = {}
        """paths of tensors in variables that a newcomer would lack: bytes"""
        self._closures: list[Place] = []
        self._sidecar_bytes = 0
        self._threads = set(threading.enumerate())
        self._readings: dict[int, tuple[list[Entry], dict[str, torch.Tensor]]] = {}
        """step -> what the script has read between its last backward pass before that update and the update, and the
        variables in `_derived`"""
        self._derived: set[str] = set()
        """paths of variables that hold what was computed from gradients, and are read after the update"""
        self._provenance: Provenance | None = None
        self._stopped: list[Provenance] = []
        """to be taken off torch's stack of modes"""
        self._memory: Memory | None = None
        """a newcomer's: what it is to become"""
        self._target = 0
        self._start = randomness.capture()
        """random state at the top of the script"""
        self._entry = 0
        """the update at which this newcomer entered"""
        self.boundary.begin = self._begin
        self.boundary.window = self._read_in_window
        self.boundary.reduced = self._reduced_in_window
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
        crossings.install(self.boundary, self.written_by_descriptor)
        self.passes.install()
        self.regions.install()
        self._places = Places(self)
        adapters.install(self._places, Patches().when_imported)
        runtime.attach(self)
        runtime.injector.at("setup", SETUP_STEP)

    def detach(self) -> bool:
        """The script asks for the two-line API. False if its training has begun without it."""
        if self._begun:
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
        return self._state(extent, self.slow.at(step, extent.slow))

    @property
    def state(self) -> ReplicaState:
        """What this rank holds now; a newcomer's is written into."""
        extent = self._extent_now()
        return self._state(extent, self.slow.mine(extent.slow))

    def _extent_now(self) -> _Extent:
        regions = self.regions
        return _Extent(len(regions.models), len(regions.optimizers), self.slow.names(), regions.waiting())

    def _state(self, extent: _Extent, slow: dict[str, torch.Tensor]) -> ReplicaState:
        regions = self.regions
        return ReplicaState.of(
            {f"model{i}": one for i, one in enumerate(regions.models[: extent.models]) if regions.trained(one)},
            {f"optimizer{i}": one for i, one in enumerate(self.regions.optimizers[: extent.optimizers])},
            {},
            lambda: slow | self._unowned(extent) | self._gradients(extent),
        )

    def _unowned(self, extent: _Extent) -> dict[str, torch.Tensor]:
        """Trained parameters of modules that the script has not called (only their children, or methods)."""
        owned = {id(p) for model in self.regions.models[: extent.models] for p in model.parameters()}
        return {
            f"optimizer{i}.{place}": parameter
            for i, optimizer in enumerate(self.regions.optimizers[: extent.optimizers])
            for place, parameter in optimized(optimizer)
            if id(parameter) not in owned
        }

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
            self._runtime.injector.at(phase, self._applied)

    # --- the way in -------------------------------------------------------------------------------

    def follow(self) -> None:
        """A newcomer: learn the way to the step of the newest plan. Survivors may go on by a step until it is there."""
        while True:
            plan = self._runtime.wait_plan()
            try:
                blob, segments = join.memory_of(self._runtime, plan)
                break
            except Aborted:
                continue
        self._memory = memory = Memory.decode(blob)
        self._target = plan.step
        self.tape.load(segments, memory.tape)
        self._runtime.publisher.adopt_segments(segments)
        self.boundary.load_draws()
        self.readings.load([value for kind, value in self.tape.asides if kind == "file"])
        self.boundary.mode = Mode.FORWARD

    def blob(self, plan: Plan) -> bytes:
        """The sidecar with which a newcomer enters by this plan."""
        return join.memory_of(self._runtime, plan)[0]

    def begin_as(self, start: list[Any]) -> None:
        """A newcomer, before the script starts: random state as the failed rank had it there."""
        self._start = randomness.State._make(start)
        randomness.restore(self._start)
        self.boundary.settle_draws()

    def _begin(self) -> None:
        """The first region of the training: set-up is over."""
        runtime = self._runtime
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
        runtime.setup_done()
        self.boundary.outside_seconds = 0.0
        self._begin_step(0)

    # --- backward ---------------------------------------------------------------------------------

    def on_backward(self, roots: list[torch.Tensor]) -> None:
        """The two-line API's hook; `before_backward` does it here."""

    def before_backward(self, roots: list[torch.Tensor]) -> bool:
        """At the start of every backward pass of the script. Returns whether it is to be run."""
        self._backwards += 1
        self.regions.no_updates()
        self._watch_no_more()
        if self.boundary.mode is Mode.LIVE:
            if self._begun and (self._applied in _REPORTED or self._news()):
                self._report()
            if self._trace is not None:
                for root in roots:
                    self._trace.loss(root)
            self._losses += [root.detach().clone() for root in _small(roots)]
            if self._begun and ddp.will_synchronize():
                self._publish(self._applied + 1)
                if self._applied in _WATCHED:
                    self._watch_window(roots)
            return True
        real, self.regions.real = self.regions.real, False
        return real

    def after_stubbed_backward(self, roots: list[torch.Tensor]) -> None:
        """A newcomer, at the end of every backward pass on its way."""
        memory = self._memory
        if memory is not None and self._backwards == memory.backwards:
            self._become(memory, _small(roots))

    def _publish(self, step: int) -> None:
        runtime = self._runtime
        end, closed = self.tape.seal()
        if closed is not None:
            runtime.publisher.publish_segment(end.segments - 1, closed)
        variables = self._variables()
        slow, large = self._sort_out(variables.tensors)
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
            large,
            self.passes.states(),
            self.passes.own_generators(),
        )
        blob = memory.encode()
        runtime.publisher.publish(step, blob)
        self._published = True
        self._sidecar_bytes = len(blob)
        self._lost = large

    def _variables(self) -> Loose:
        """What the script's variables hold, apart from what is known as a model or by an optimizer."""
        if self._looked != self.passes.count:
            self._looked = self.passes.count
            walk.find_generators()
        return walk.loose(walk.user_frames(sys._getframe()), self._known())

    def _known(self) -> Known:
        regions = self.regions
        known = {id(module) for model in regions.models for module in model.modules()}
        known.update(id(p) for optimizer in regions.optimizers for _, p in optimized(optimizer))
        return Known(known, regions.held)

    def _sort_out(self, tensors: dict[str, torch.Tensor]) -> tuple[list[str], dict[str, int]]:
        """Take large tensors out of `tensors`: returns the paths of those that the script keeps, and the others, which
        are new in each step, with their bytes."""
        untrained = self._hold_untrained()
        room, slow, large, identities = _ROOM, [], {}, {}
        for path in sorted(tensors, key=lambda path: tensors[path].nbytes):
            tensor = tensors[path]
            room -= tensor.nbytes
            if room >= 0:
                continue
            del tensors[path]
            identities[path] = id(tensor)
            if self._large.get(path, id(tensor)) == id(tensor):
                slow.append(path)
                self.slow.hold(path, {"": tensor})
            else:
                large[path] = tensor.nbytes
        self._large = identities
        self.slow.keep({*slow, *untrained})
        return slow, large

    def _hold_untrained(self) -> list[str]:
        """Models that no optimizer updates: an average of weights, a teacher."""
        regions = self.regions
        names = [f"model{i}" for i, model in enumerate(regions.models) if not regions.trained(model)]
        for name in names:
            self.slow.hold(name, dict(regions.models[int(name.removeprefix("model"))].named_parameters()))
        return names

    def _take_variables(self, memory: Memory) -> list[torch.Tensor]:
        """A newcomer: give the script's variables the failed rank's values. Returns the tensors."""
        for path, size in memory.large.items():
            self.boundary.fail(f"{path} ({size / 1e6:.1f} MB) is read after backward() and too large to be sent")
        walk.find_generators()
        frames, known = walk.user_frames(sys._getframe()), self._known()
        changed = walk.inject(frames, memory.loose, memory.scalars, known, memory.aliases)
        elsewhere = {f"{path} (missing)" for path in memory.slow}
        missing = [path for path in changed if path.endswith(" (missing)") and path not in elsewhere]
        if missing:
            self.boundary.fail(f"{missing[0].removesuffix(' (missing)')} is not there in both")
        here = walk.loose(frames, known)
        for path in memory.slow:
            if path not in here.tensors:
                self.boundary.fail(f"{path} is not there")
            self.slow.hold(path, {"": here.tensors[path]})
        self.slow.keep({*memory.slow, *self._hold_untrained()})
        return [tensor for path, tensor in here.tensors.items() if path in memory.loose]

    def announce(self) -> None:
        """A newcomer is about to report that it is ready: its supervisor is to know what it has not printed."""
        muted = self.outputs.muted()
        self._runtime.send(Muted(muted.lines, muted.last))

    def _become(self, memory: Memory, roots: list[torch.Tensor]) -> None:
        """A newcomer at its last backward pass: take over what only the failed rank knew."""
        boundary = self.boundary
        if self.tape.left:
            boundary.fail(f"{self.tape.left} recorded values were not asked for on the way to update {self._target}")
        own = [*self._take_variables(memory), *self.regions.scales()]
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
        self._provenance = Provenance(own, self._replicated(), ddp.synchronized())
        self._provenance.start()

    def _replicated(self) -> list[torch.Tensor]:
        """The very objects whose values are equal on all ranks."""
        called = [p for model in self.regions.models for p in model.parameters()]
        return [*called, *(p for optimizer in self.regions.optimizers for _, p in optimized(optimizer))]

    # --- the window -------------------------------------------------------------------------------

    def readings_before(self, step: int) -> bytes:
        """For a newcomer that enters after update `step`: what the script has read just before it."""
        return encoding.encode(self._readings.get(step, ([], {})))

    def _derived_values(self) -> dict[str, torch.Tensor]:
        """At an update: variables that were computed from gradients, which a newcomer has to get from a survivor."""
        if self._provenance is None and not self._derived:
            return {}
        tensors = self._variables().tensors
        if self._provenance is not None:
            of, restored = self._provenance.known, self._known()
            self._derived |= {
                path
                for path, tensor in tensors.items()
                if of(tensor) is Origin.REPLICATED and walk.memory_of(tensor) not in restored
            }
        return {
            path: tensors[path].detach().clone()
            for path in self._derived
            if path in tensors and tensors[path].nbytes <= _ROOM
        }

    def _read_in_window(self, kind: str, line: int, compute: Callable[[], Any], subjects: tuple[Any, ...]) -> Any:
        """A newcomer's script reads a value after its last backward pass, which is on no tape."""
        assert self._memory is not None
        assert self._provenance is not None
        if kind in ("f", "t", "u"):
            return compute()
        if kind == "v":
            origin = self._provenance.origin(*subjects)
            if origin is Origin.OWN:
                return compute()
            if origin is Origin.LOST:
                self.boundary.fail(
                    f"line {line} reads a value between backward() and the end of optimizer.step() that only the "
                    "failed rank had"
                )
        at = self.tape.count - self._memory.tape.entries
        of_sources = [read for read, _ in self._readings_of_sources()]
        if kind == "s" and all(len(read) == at for read in of_sources):
            return True  # noted after the update, and this is the update before which we enter
        if any(len(read) <= at for read in of_sources):
            self.boundary.fail(f"line {line} reads a value that the other ranks have not read")
        with self.boundary.aside():
            found = {encoding.encode(read[at]): read[at] for read in of_sources}
        if len(found) > 1:
            self.boundary.fail(f"line {line}: the other ranks have read different values there")
        ((of_kind, at_line, value),) = found.values()
        if (of_kind, at_line) != (kind, line):
            self.boundary.fail(f"line {line}: the other ranks have read something else, at line {at_line}")
        return value

    def _derive_in_window(self) -> None:
        """A newcomer at the update before its entry: variables that were computed from its stub gradients get the
        survivors' values."""
        provenance, memory = self._provenance, self._memory
        assert provenance is not None
        assert memory is not None
        known = self._known()
        for path, tensor in walk.loose(walk.user_frames(sys._getframe()), known).tensors.items():
            origin = provenance.known(tensor)
            if origin is Origin.OWN or path in memory.slow or walk.memory_of(tensor) in known:
                continue
            values = {}
            if origin is Origin.REPLICATED:
                of_sources = [derived.get(path) for _, derived in self._readings_of_sources()]
                values = {encoding.encode(value): value for value in of_sources}
            value = next(iter(values.values())) if len(values) == 1 else None
            if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype:
                self.boundary.fail(f"{path}, computed between backward() and the end of optimizer.step(), is lost")
            tensor.data.copy_(value)

    def _readings_of_sources(self) -> list[tuple[list[Entry], dict[str, torch.Tensor]]]:
        """What the survivors at our step have read, and their derived variables."""
        runtime = self._runtime
        plan = runtime.wait_plan()
        found: list[tuple[list[Entry], dict[str, torch.Tensor]]] = []
        if plan.step == self._target:
            with contextlib.suppress(OSError):
                found = [encoding.decode(join.readings_of(runtime, plan, rank)) for rank in plan.sources]
        if not found:
            self.boundary.fail("what the other ranks have read before this update is no longer known")
        return found

    def is_true(self, tensor: torch.Tensor) -> None:
        """What a newcomer got has the value that it had in the failed rank."""
        if self._provenance is not None:
            self._provenance.mark(tensor, Origin.OWN)

    def _reduced_in_window(self, tensors: tuple[Any, ...]) -> None:
        if self._provenance is not None:
            for one in tensors:
                for tensor in one if isinstance(one, (list, tuple)) else [one]:
                    if isinstance(tensor, torch.Tensor):
                        self._provenance.reduced(tensor)

    def _leave_window(self) -> None:
        if self._provenance is not None:
            self._stopped.append(self._provenance)
            self._provenance = None
        self._take_off()

    def _take_off(self) -> None:
        self._stopped = [one for one in self._stopped if not one.stop()]

    # --- what is protected ------------------------------------------------------------------------

    def _watch_window(self, roots: list[torch.Tensor]) -> None:
        """Look once at where the values come from that the script reads between backward and the end of the update."""
        own = [*self._variables().tensors.values(), *_small(roots), *self.regions.scales()]
        self._watch(Provenance(own, self._replicated(), ddp.synchronized()))

    def _watch_tail(self) -> None:
        """The same after the update, where all is known but the gradients, which are used up."""
        self._watch(Provenance([], self._replicated(), (), default=Origin.OWN))

    def _watch(self, provenance: Provenance) -> None:
        self._watch_no_more()
        self._provenance = provenance
        self.boundary.observer = self._observe
        provenance.start()

    def _watch_no_more(self) -> None:
        if self.boundary.observer is not None:
            self.boundary.observer = None
            self._leave_window()

    def _observe(self, kind: str, where: str, subjects: tuple[Any, ...]) -> None:
        if kind != "v" or self._provenance is None or self._provenance.origin(*subjects) is not Origin.LOST:
            return
        if self._entry_backwards == self._backwards:  # a newcomer, right after its entry
            self._give_up(f"{where} reads gradients after optimizer.step(), which only the failed rank had")
        after = self.regions.has_updated
        what = "gradients are read after optimizer.step()" if after else (
            "a value is read between backward() and the end of optimizer.step() that no other rank has"
        )
        fix = "read it before optimizer.step()" if after else "read it before backward(), or after optimizer.step()"
        self._findings[where] = Finding("unprotected", f"lost {where}", what, where, fix)

    def _news(self) -> bool:
        """Whether something has come up since the last report that is not protected."""
        return self._told_of != self._number_of_findings()

    def _number_of_findings(self) -> tuple[int, int, int]:
        boundary = self.boundary
        return len(self._findings), len(boundary.too_large) + len(boundary.unmovable), len(self._lost)

    def written_by_descriptor(self, where: str) -> None:
        """The script opens a file for writing by os.open, which nobody mutes in a newcomer."""
        what = "a file is written through os.open"
        self._findings[where] = Finding("unprotected", f"descriptor {where}", what, where, "use open() for it")

    def _report(self) -> None:
        """Tell what was recognised and what is protected; as often as more may be known."""
        self._told_of = self._number_of_findings()
        with self.boundary.aside():
            runtime, regions, passes = self._runtime, self.regions, self.passes
            others = list(self._findings.values())
            if any(frame.f_code.co_name in _COMPREHENSIONS for frame in walk.user_frames(sys._getframe())):
                what = "steps run inside a comprehension, whose half-built result nobody sees"
                advice = "exact if it collects numbers; collect tensors in a variable"
                others.append(Finding("note", "comprehension", what, "", advice))
            fix = f"take less out, or {lint.TWO_LINES}"
            others += [
                Finding("unprotected", reason, f"{reason}, which cannot be made anew elsewhere", "", lint.TWO_LINES)
                for reason in (passes.indescribable, regions.indescribable)
                if reason
            ]
            others += [
                Finding("unprotected", f"size {at}", f"{lint.size(size)} are taken out of a tensor", at, fix)
                for at, size in self.boundary.too_large.items()
            ]
            others += [
                Finding("unprotected", f"unmovable {at}", f"what cannot be moved is read: {why}", at, fix)
                for at, why in self.boundary.unmovable.items()
            ]
            found = facts.gather(
                step=self._applied,
                world_size=runtime.world_size,
                loaders=passes.loaders,
                models=[model for model in regions.models if regions.trained(model)],
                optimizers=regions.optimizers,
                schedulers=[one for ref in regions.schedulers if (one := ref()) is not None],
                scalers=regions.scalers,
                adapters=tuple(self._places.applied),
                sidecar_bytes=self._sidecar_bytes,
                journal_budget=runtime.budget,
                tape_bytes=self.tape.bytes / self._applied if self._applied else 0.0,
                forward_seconds=self.boundary.outside_seconds / self._applied if self._applied else 0.0,
                large=tuple(Large(path, size) for path, size in self._lost.items()),
                threads=facts.threads(self._threads),
                closures=tuple(self._closures),
                weights=combined(self.state.digests(), b"") if self._applied == 1 else "",
                others=tuple(others),
            )
            protect(runtime, found)

    # --- updates ----------------------------------------------------------------------------------

    def on_update(self, optimizer: Optimizer, update: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of optimizer.step()."""
        boundary, runtime = self.boundary, self._runtime
        nested = boundary.inside > 0  # in a gradient scaler's region
        if not nested:
            boundary.enter()
        try:
            if boundary.mode is not Mode.LIVE:
                return self._stubbed_update(optimizer, update)
            if any(callable(argument) for argument in (*args, *kwargs.values())):
                self._closures = [Place("", where(sys._getframe(2)))]
                self._report()
                self._unprotect("optimizer.step(closure) runs backward passes inside the update")
                return update(*args, **kwargs)
            self._take_off()
            number = self._applied
            index = self.regions.optimizers.index(optimizer)
            if self._backwards == self._entry_backwards and index not in self._graded:
                self._give_up("an optimizer follows on another one without a backward pass, for the first time")
            self.at("optimizer")
            before = randomness.capture() if number < _LATE_CHECKS else None
            with runtime.gate:
                result = update(*args, **kwargs)
                self.regions.updated(index)
                self._commit()
            if before is not None and before != randomness.capture():
                self._unprotect("the optimizer draws random numbers in its update")
            if number in _WATCHED:
                self._watch_tail()
            runtime.injector.at("commit", number)
            if self._trace is not None and self._trace.done(number + 1):
                trace.leave(runtime, number + 1)
            return result
        finally:
            if not nested:
                boundary.leave()

    def _commit(self) -> None:
        """The update is applied. Runs inside the commit gate."""
        step = self._applied = self._applied + 1
        self.slow.commit(step)
        self.scalars[step] = self.state.scalars()
        self.scalars.pop(step - 3, None)
        self._extent[step] = self._extent_now()
        self._readings[step] = (self.tape.answers(), self._derived_values())
        for kept in (self._extent, self._readings):
            kept.pop(step - 3, None)
        if self._trace is not None:
            values = trace.variables(sys._getframe())
            self._trace.commit(step, self.state.digests(), self.scalars[step], values, randomness.capture())
        if step == self._entry + _AHEAD:
            self.outputs.caught_up()
        self._begin_step(step)
        self._runtime.progress(step)

    def _begin_step(self, step: int) -> None:
        self._losses = []
        self._published = False
        self._runtime.journal.step = step
        self._runtime.injector.step_begins(step, self._runtime.journal)
        if self._runtime.injector.wants("between"):
            self.boundary.next_region = lambda: self.at("between")

    def _stubbed_update(self, optimizer: Optimizer, update: Callable[..., Any]) -> None:
        """A newcomer's optimizer.step(): the place where it becomes live, if its step has come."""
        graded = sum(p.grad is not None for _, p in optimized(optimizer))
        if self._made_state.get(id(optimizer)) != graded:
            # The script may hold the optimizer's state (in a checkpoint it has put together): so it must be there, and
            # the very tensors that get the replicas' values.
            self._made_state[id(optimizer)] = graded
            update()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for the scheduler's order check
        self.regions.updated(self.regions.optimizers.index(optimizer))
        step = self._applied + 1
        if step < self._target:
            self._applied = step
            return
        if self.boundary.mode is not Mode.WINDOW:
            self.boundary.fail(f"update {step} comes before its backward pass")
        self._applied = step
        self._derive_in_window()
        self._leave_window()
        state = randomness.capture()
        if join.join(self._runtime, self, step):
            randomness.restore(state)
            self.boundary.settle_draws()
            self._watch_tail()
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
        self._entry = step
        self.boundary.mode = Mode.LIVE
        muted: dict[str, int] = {}
        if self._trace is None:
            found = self.outputs.go_live()
            muted = found.calls
            for doubt in found.doubts:
                self._runtime.send(Notice("warning", f"{doubt}: others write to it, too; lines may stand twice"))
        else:
            self._trace.entered()
        self._runtime.journal.step = step
        self.scalars = {step: scalars}
        self.slow.commit(step)
        self._extent = {step: self._extent_now()}
        self._graded = frozenset(self._extent[step].waiting)
        self._entry_backwards = self._backwards
        self._readings = {step: (self.tape.answers(), self._derived_values())}
        self._begin_step(step)
        return muted

    # --- helpers ----------------------------------------------------------------------------------

    def _ask_of_output(self, kind: str, compute: Callable[[], Any]) -> Any:
        """What the output layer wants to know of the failed rank's files."""
        return self.boundary.cross("f", compute, 0) if self.boundary.outside else compute()

    def model_found(self, model: torch.nn.Module) -> None:
        """A model was called for the first time."""
        self._buffers.append(LocalBuffers(model))
        if self._runtime.injector.wants("backward"):
            parameters = [p for p in model.parameters() if p.requires_grad]
            if parameters:
                parameters[len(parameters) // 2].register_hook(lambda _: self.at("backward"))

    def _unprotect(self, reason: str) -> None:
        """A failure could not be healed from here on; the training goes on."""
        runtime = self._runtime
        if not runtime.unprotected:
            runtime.unprotected = reason
            runtime.journal.set_budget(0)
            runtime.send(Notice("warning", f"not protected: {reason}"))

    def ended(self) -> None:
        """The script has ended. A newcomer whose script ends on its way has gone another way than the failed rank."""
        if self._memory is not None and not self._runtime.live:
            self._give_up(
                f"it ended after update {self._applied}, but the failed rank was at update {self._target}: "
                "it went another way, perhaps because of a file that has changed since"
            )

    def _give_up(self, reason: str) -> NoReturn:
        script = sys.argv[0] if sys.argv else "the script"
        self._runtime.send(Unprotected(f"{script} cannot be followed to the step of the failure: {reason}"))
        self._runtime.wait_for_end()
        raise Diverged(reason)


def _small(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    return [root for root in roots if root.numel() <= 64]


def protect(runtime: Runtime, found: Facts) -> None:
    """Send what was found. Under --strict, what is not protected ends the job here, before a further update."""
    runtime.send(Protection(found))
    if os.environ.get("TORCHPASS_STRICT") == "1" and lint.unprotected(lint.judge(found)):
        runtime.wait_for_end()

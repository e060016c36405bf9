"""The window: from the last backward pass before an update to the end of that update.

What the script reads there is on no tape when the rank dies: it may have contributed to the update before it could
publish that. So every rank keeps what it has read in its newest windows, and a newcomer answers its script from its own
values where they are true, and from the survivors' where those must be equal (`provenance`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from tpwrap.engine import ddp, encoding, join
from tpwrap.engine.script import walk
from tpwrap.engine.script.boundary import Boundary
from tpwrap.engine.script.memory import Memory
from tpwrap.engine.script.provenance import Origin, Provenance
from tpwrap.engine.script.regions import Regions
from tpwrap.engine.script.tape import Entry
from tpwrap.engine.script.variables import ROOM, Variables

if TYPE_CHECKING:
    from tpwrap.engine.runtime import Runtime

_Read = tuple[list[Entry], dict[str, torch.Tensor]]
"""what was read in a window, and the variables that were derived from gradients in it"""


class Window:
    """Follows where tensors come from, while that matters."""

    def __init__(self, runtime: Runtime, boundary: Boundary, regions: Regions, variables: Variables) -> None:
        self.provenance: Provenance | None = None
        self._runtime = runtime
        self._boundary = boundary
        self._regions = regions
        self._variables = variables
        self._memory: Memory | None = None
        self._target = 0
        self._kept: dict[int, _Read] = {}
        """by step"""
        self._derived: set[str] = set()
        """paths of variables that hold what was computed from gradients, and are read after the update"""
        self._stopped: list[Provenance] = []
        """to be taken off torch's stack of modes"""
        boundary.window = self._answer
        boundary.reduced = self._reduced

    # --- open and close ---------------------------------------------------------------------------

    def open(self, own: Iterable[torch.Tensor]) -> None:
        """After a backward pass. own: tensors whose values are true."""
        known = [*own, *self._regions.scales()]
        self._start(Provenance(known, self._replicated(), ddp.synchronized(), skip=self._skip))

    def open_for(self, memory: Memory, target: int, own: Iterable[torch.Tensor]) -> None:
        """A newcomer's, which is to enter after update `target`."""
        self._memory, self._target = memory, target
        self.open(own)

    def open_tail(self) -> None:
        """After an update: all is known but the gradients, which are used up."""
        self._start(Provenance([], self._replicated(), (), Origin.OWN, self._skip))

    def _skip(self) -> bool:
        """What happens in a region is not followed."""
        return self._boundary.inside > 0

    def close(self) -> None:
        """Follow no more."""
        if self.provenance is not None:
            self._stopped.append(self.provenance)
            self.provenance = None
        self.take_off()

    def take_off(self) -> None:
        """Take off torch's stack of modes what could not be taken off when it was closed."""
        self._stopped = [one for one in self._stopped if not one.stop()]

    def _start(self, provenance: Provenance) -> None:
        self.close()
        self.provenance = provenance
        provenance.start()

    def _replicated(self) -> list[torch.Tensor]:
        """The very objects whose values are equal on all ranks."""
        regions = self._regions
        called = [p for model in regions.models for p in model.parameters()]
        return [*called, *(parameter for optimizer in regions.optimizers for parameter in regions.updates(optimizer))]

    def is_true(self, tensor: torch.Tensor) -> None:
        """What a newcomer got has the value that it had in the failed rank."""
        if self.provenance is not None:
            self.provenance.mark(tensor, Origin.OWN)

    def _reduced(self, tensors: Any, equal: bool) -> None:
        if self.provenance is not None:
            for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                if isinstance(tensor, torch.Tensor) and equal:
                    self.provenance.reduced(tensor)
                elif isinstance(tensor, torch.Tensor):
                    self.provenance.mark(tensor, Origin.LOST)

    # --- what a survivor has read -----------------------------------------------------------------

    def keep(self, step: int, read: list[Entry]) -> None:
        """At the end of update `step`."""
        self._kept[step] = (read, self._derived_values())
        self._kept.pop(step - 3, None)

    def kept(self, step: int) -> bytes:
        """For a newcomer that enters after update `step`."""
        return encoding.encode(self._kept.get(step, ([], {})))

    def _derived_values(self) -> dict[str, torch.Tensor]:
        """Variables that were computed from gradients, which a newcomer has to get from a survivor."""
        if self.provenance is None and not self._derived:
            return {}
        tensors = self._variables.now().tensors
        if self.provenance is not None:
            of, restored = self.provenance.known, self._variables.known()
            self._derived |= {
                path
                for path, tensor in tensors.items()
                if of(tensor) is Origin.REPLICATED and walk.memory_of(tensor) not in restored
            }
        return {
            path: tensors[path].detach().clone()
            for path in self._derived
            if path in tensors and tensors[path].nbytes <= ROOM
        }

    # --- a newcomer's -----------------------------------------------------------------------------

    def _answer(self, kind: str, line: int, compute: Callable[[], Any], subjects: tuple[Any, ...]) -> Any:
        """A newcomer's script reads a value after its last backward pass, which is on no tape."""
        boundary, memory, provenance = self._boundary, self._memory, self.provenance
        assert memory is not None
        assert provenance is not None
        if kind in ("f", "t", "u"):
            return compute()
        if kind == "v":
            origin = provenance.origin(*subjects)
            if origin is Origin.OWN:
                return compute()
            if origin is Origin.LOST:
                boundary.fail(
                    f"line {line} reads a value between backward() and the end of optimizer.step() that only the "
                    "failed rank had"
                )
        at = boundary.tape.count - memory.tape.entries
        of_sources = [read for read, _ in self._of_sources()]
        if kind == "s" and all(len(read) == at for read in of_sources):
            return True  # noted after the update, and this is the update before which we enter
        if any(len(read) <= at for read in of_sources):
            boundary.fail(f"line {line} reads a value that the other ranks have not read")
        with boundary.aside():
            found = {encoding.encode(read[at]): read[at] for read in of_sources}
        if len(found) > 1:
            boundary.fail(f"line {line}: the other ranks have read different values there")
        ((of_kind, at_line, value),) = found.values()
        if (of_kind, at_line) != (kind, line):
            boundary.fail(f"line {line}: the other ranks have read something else, at line {at_line}")
        return value

    def derive(self) -> None:
        """At the update: variables that were computed from stub gradients get the survivors' values."""
        provenance, memory = self.provenance, self._memory
        assert provenance is not None
        assert memory is not None
        known = self._variables.known()
        for path, tensor in walk.loose(walk.user_frames(sys._getframe()), known).tensors.items():
            origin = provenance.known(tensor)
            if origin is Origin.OWN or path in memory.slow or walk.memory_of(tensor) in known:
                continue
            values = {}
            if origin is Origin.REPLICATED:
                of_sources = [derived.get(path) for _, derived in self._of_sources()]
                values = {encoding.encode(value): value for value in of_sources}
            value = next(iter(values.values())) if len(values) == 1 else None
            if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype:
                self._boundary.fail(f"{path}, computed between backward() and the end of optimizer.step(), is lost")
            tensor.data.copy_(value)

    def _of_sources(self) -> list[_Read]:
        """What the survivors at our step have kept."""
        runtime = self._runtime
        plan = runtime.wait_plan()
        found: list[_Read] = []
        if plan.step == self._target:
            with contextlib.suppress(OSError):
                found = [encoding.decode(join.readings_of(runtime, plan, rank)) for rank in plan.sources[runtime.rank]]
        if not found:
            self._boundary.fail("what the other ranks have read before this update is no longer known")
        return found

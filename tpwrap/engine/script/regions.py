"""Models, backward passes, optimizers and gradient scalers as regions; what stands for them in a newcomer's way."""

from __future__ import annotations

import functools
import heapq
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as torch_c10d
from torch.optim import Optimizer

from tpwrap.engine import ddp
from tpwrap.engine.scalars import optimized
from tpwrap.engine.script import shapes
from tpwrap.engine.script.boundary import Boundary, Mode
from tpwrap.engine.script.patches import Patches
from tpwrap.engine.script.slow import some

if TYPE_CHECKING:
    from tpwrap.engine.script.script import Script


Sample = tuple[torch.nn.Parameter, torch.Tensor]
"""a weight, and a few of its elements at one moment"""
_SAMPLED = 4
"""tensors of weights that are looked at in every commit"""


class Regions:
    """What the script trains with, found as it is made or used."""

    def __init__(self, boundary: Boundary, table: shapes.Table, script: Script) -> None:
        self.models: list[torch.nn.Module] = []
        """modules that the script calls itself, in the order of their first call"""
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.scalers: list[Any] = []
        self.indescribable = ""
        self.real = False
        """a newcomer has run a model since the last backward pass"""
        self.through = 0
        """calls of wrappers (DDP) around code of the script's own"""
        self._boundary = boundary
        self._table = table
        self._script = script
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._has_parameters: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self._row: list[int] = []
        """optimizers that have updated since the last backward pass began"""
        self._followers: dict[int, set[int]] = {}
        self._zeros: dict[int, torch.Tensor] = {}

    def install(self) -> None:
        # What it reads from tensors depends on whether there are other ranks to talk to.
        torch_c10d._new_process_group_helper = self._boundary.quiet(torch_c10d._new_process_group_helper)
        self._install_models()
        self._install_backward()
        self._install_norms()
        self._install_optimizers()
        self._install_schedulers()
        self._install_scalers()

    # --- models -----------------------------------------------------------------------------------

    def _install_models(self) -> None:
        original: Callable[..., Any] = torch.nn.Module.__call__
        boundary = self._boundary

        def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if boundary.inside or not boundary.outside or not self._trains(module):
                return original(module, *args, **kwargs)
            return self._forward(module, original, args, kwargs)

        torch.nn.Module.__call__ = __call__  # type: ignore[method-assign]

    def _trains(self, module: torch.nn.Module) -> bool:
        """Whether it has parameters. Others (losses, augmentations) are the script's own code."""
        known = self._has_parameters.get(module)
        if known is None:
            known = next(module.parameters(), None) is not None
            self._has_parameters[module] = known
        return known

    def _forward(self, module: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        boundary = self._boundary
        boundary.enter()
        try:
            if boundary.begin is not None:  # a trial run in set-up: like set-up, it runs for real everywhere
                return call(module, *args, **kwargs)
            self.found(module)
            self.no_updates()
            if boundary.mode is Mode.LIVE:
                self._script.at("forward")
                output = call(module, *args, **kwargs)
                boundary.tape.record("m", 0, self._described(output))
                return output
            if boundary.mode is Mode.WINDOW:
                boundary.fail("a model is called between backward() and the end of optimizer.step()")
            description = self._table.look_up(boundary.cross("m", lambda: None, 0))
            if self.through or self.for_real(module):
                return call(module, *args, **kwargs)
            try:
                return shapes.stub(description)
            except shapes.Indescribable as error:
                boundary.fail(f"a model returns {error}")
        finally:
            boundary.leave()

    def found(self, module: torch.nn.Module) -> None:
        """A module of the script's own is called. One that is a part of another is known with that."""
        if module not in self._known:
            self._known.update(module.modules())
            self.models.append(module)
            self._script.model_found(module)

    def for_real(self, module: torch.nn.Module) -> bool:
        """Whether a newcomer must run this call of a module. Ask once for each call.

        A reducer of DDP must see its first synchronized pass (of a static graph, two), so that it lays out its buckets
        as the survivors' have done.
        """
        instances = ddp.within(module)
        real = not instances and ddp.is_replicated(module)
        if not torch.is_grad_enabled():
            return real  # its first forward makes the instance of DDP, whatever it is for
        for instance in instances:
            ddp.rebuild(instance)
            seen = self._seen.get(instance, 0)
            if instance.require_backward_grad_sync and seen < ddp.passes_needed(instance):
                self._seen[instance] = seen + 1
                real = True
        self.real = self.real or real
        return real

    def see_through(self, module: torch.nn.Module, through: bool) -> None:
        """Whether calls of a module with parameters are to be taken for the script's own code."""
        self._has_parameters[module] = not through

    def _described(self, output: Any) -> Any:
        try:
            return self._table.number(output)
        except shapes.Indescribable as error:
            self.indescribable = self.indescribable or f"a model returns {error}"
            return (-1, ("plain", None))

    # --- backward ---------------------------------------------------------------------------------

    def _install_backward(self) -> None:
        original = torch.autograd.backward
        gradients = torch.autograd.grad
        boundary = self._boundary

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if boundary.inside or not boundary.outside:
                return original(tensors, *args, **kwargs)
            boundary.enter()
            try:
                roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                if self._script.before_backward(roots):
                    original(tensors, *args, **kwargs)
                if boundary.mode is not Mode.LIVE:
                    self._stub_gradients()
                    self._script.after_stubbed_backward(roots)
            finally:
                boundary.leave()
            return None

        @functools.wraps(gradients)
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if boundary.mode is not Mode.FORWARD or not boundary.outside:
                return gradients(outputs, inputs, *args, **kwargs)
            wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            return tuple(torch.zeros_like(one).requires_grad_(bool(kwargs.get("create_graph"))) for one in wanted)

        torch.autograd.backward = backward
        torch.autograd.grad = grad

    def _stub_gradients(self) -> None:
        """As after a backward pass: every parameter that is trained has a gradient."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and parameter.grad is None:
                        zeros = self._zeros.get(id(parameter))
                        if zeros is None or zeros.shape != parameter.shape:
                            zeros = self._zeros[id(parameter)] = torch.zeros_like(parameter)
                        parameter.grad = zeros

    # --- norms ------------------------------------------------------------------------------------

    def _install_norms(self) -> None:
        """Norms of the gradients are equal on all ranks, and often logged after the update: a newcomer, whose own
        gradients are none, gets them from the others."""
        boundary, script = self._boundary, self._script

        def observed(original: Any) -> Any:
            @functools.wraps(original)
            def norm(*args: Any, **kwargs: Any) -> Any:
                if not boundary.outside or not args:
                    return original(*args, **kwargs)
                parameters, rest = args[0], args[1:]
                given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
                line = sys._getframe(1).f_lineno
                value: torch.Tensor = boundary.cross(
                    "g", lambda: original(given, *rest, **kwargs).detach().clone(), line, tuple(given)
                )
                value = value.to(given[0].device if given else "cpu")
                script.window.is_true(value)
                return value

            return norm

        functions = [getattr(torch.nn.utils, name) for name in ("clip_grad_norm_", "get_total_norm")]
        Patches().everywhere([(one, observed(one)) for one in functions])

    # --- optimizers -------------------------------------------------------------------------------

    def _install_optimizers(self) -> None:
        original = Optimizer.__init__
        regions = self

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            regions._optimizer_made(self)

        Optimizer.__init__ = init  # type: ignore[method-assign]

    def _optimizer_made(self, optimizer: Optimizer) -> None:
        boundary, script = self._boundary, self._script
        if not boundary.outside or "step" in vars(optimizer):
            return  # one inside another (ZeroRedundancyOptimizer): the outer one's step is the update
        self.optimizers.append(optimizer)
        update = optimizer.step

        @functools.wraps(update)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if (boundary.inside and not script.in_scaler) or boundary.mode is Mode.OFF:
                return update(*args, **kwargs)
            return script.on_update(optimizer, update, args, kwargs)

        # A scheduler wraps it once more, and takes it for the bound method that it usually is.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def trained(self, model: torch.nn.Module) -> bool:
        """Whether an optimizer updates any of its parameters."""
        updated = {id(p) for optimizer in self.optimizers for _, p in optimized(optimizer)}
        return any(id(parameter) in updated for parameter in model.parameters())

    def sample(self) -> list[Sample]:
        """A few elements of the largest weights that are trained."""
        parameters = (p for optimizer in self.optimizers for p in self.updates(optimizer))
        return [(p, some(p)) for p in heapq.nlargest(_SAMPLED, parameters, key=lambda p: p.numel())]

    def forget(self) -> None:
        """A newcomer is live: what stood for gradients on its way is needed no more."""
        self._zeros = {}

    def updates(self, optimizer: Optimizer) -> list[torch.nn.Parameter]:
        """The parameters that an optimizer updates."""
        return [parameter for _, parameter in optimized(optimizer)]

    def held(self) -> Iterator[torch.Tensor]:
        """What models and optimizers hold."""
        for model in self.models:
            yield from model.parameters()
            yield from model.buffers()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def updated(self, index: int) -> None:
        """An optimizer has applied an update."""
        for earlier in self._row:
            self._followers.setdefault(earlier, set()).add(index)
        self._row.append(index)

    @property
    def has_updated(self) -> bool:
        """Whether an optimizer has updated since the last backward pass began."""
        return bool(self._row)

    def no_updates(self) -> None:
        """A forward or backward pass begins: what updates now does not follow on the updates before."""
        self._row.clear()

    def waiting(self) -> list[int]:
        """Optimizers that have followed on the one that has just updated, without another backward pass, and not yet
        this time."""
        followers = self._followers.get(self._row[-1], set()) if self._row else set()
        return sorted(followers - set(self._row))

    def _install_schedulers(self) -> None:
        original = torch.optim.lr_scheduler.LRScheduler.__init__
        regions = self

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            regions.schedulers.append(weakref.ref(self))
            original(self, *args, **kwargs)

        torch.optim.lr_scheduler.LRScheduler.__init__ = init  # type: ignore[method-assign]

    def scales(self) -> list[torch.Tensor]:
        """Tensors of gradient scalers. They follow from whether updates went through, so a newcomer's are true."""
        held = [value for scaler in self.scalers for value in vars(scaler).values()]
        return [value for value in held if isinstance(value, torch.Tensor)]

    # --- gradient scalers -------------------------------------------------------------------------

    def _install_scalers(self) -> None:
        scaler = torch.amp.GradScaler
        boundary, script = self._boundary, self._script
        make, step, unscale, update = scaler.__init__, scaler.step, scaler.unscale_, scaler.update

        @functools.wraps(make)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            regions.scalers.append(self)

        regions = self

        @functools.wraps(step)
        def scaled_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_enabled() or not boundary.outside:
                return step(self, optimizer, *args, **kwargs)
            before = script.step
            boundary.enter()
            script.in_scaler = True
            try:
                if boundary.mode is Mode.LIVE:
                    result = step(self, optimizer, *args, **kwargs)
                    boundary.tape.record("s", 0, script.step > before)
                    return result
                applied = boundary.cross("s", lambda: True, 0)
                state = self._per_optimizer_states[id(optimizer)]
                device = next(p.device for g in optimizer.param_groups for p in g["params"])
                state["found_inf_per_device"] = {device: torch.full((), float(not applied), device=device)}
                state["stage"] = torch.amp.grad_scaler.OptState.STEPPED
                return optimizer.step(*args, **kwargs) if applied else None
            finally:
                script.in_scaler = False
                boundary.leave()

        @functools.wraps(unscale)
        def unscale_(self: Any, optimizer: Any) -> None:
            if not self.is_enabled() or not boundary.outside:
                unscale(self, optimizer)
                return
            boundary.enter()
            try:
                if boundary.mode is Mode.LIVE:
                    unscale(self, optimizer)
                else:
                    self._per_optimizer_states[id(optimizer)]["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
            finally:
                boundary.leave()

        @functools.wraps(update)
        def updated(self: Any, new_scale: Any = None) -> None:
            if not self.is_enabled() or not boundary.outside:
                update(self, new_scale)
                return
            boundary.enter()
            try:
                # In a newcomer, too: its scale follows from whether the updates went through, which it knows.
                update(self, new_scale)
            finally:
                boundary.leave()

        scaler.__init__, scaler.step = init, scaled_step  # type: ignore[method-assign]
        scaler.unscale_, scaler.update = unscale_, updated  # type: ignore[method-assign]

"""What the engine must know of DistributedDataParallel: when it synchronizes, and how its buckets are laid out.

DDP builds its buckets twice: at construction, and once more at the first forward after the first synchronized backward,
in the order in which gradients became ready (with a broadcast of that order from rank 0). Another layout means other
roundings; another *size* makes gloo abort the receiver. So a newcomer must be in the same phase as the survivors, and
the layouts are compared before anyone goes on.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

_instances: list[weakref.ref[Any]] = []


class _Readiness:
    """The order in which the gradients of one instance became ready in its newest backward pass."""

    def __init__(self, instance: Any) -> None:
        self.order: list[torch.nn.Parameter] = []
        self._handles = [instance.register_forward_pre_hook(lambda *_: self.order.clear())]
        self._handles += [
            parameter.register_post_accumulate_grad_hook(self.order.append)
            for parameter in instance.parameters()
            if parameter.requires_grad
        ]

    def stop(self) -> list[torch.nn.Parameter]:
        for handle in self._handles:
            handle.remove()
        return self.order


_readiness: weakref.WeakKeyDictionary[Any, _Readiness] = weakref.WeakKeyDictionary()


def install(offline: Callable[[], bool]) -> None:
    """Note every DDP instance that the script makes. offline: whether this is a newcomer before its entry."""
    # Not the constructor: its warnings name the line that calls it, which would be ours.
    original: Any = DistributedDataParallel._ddp_init_helper

    @functools.wraps(original)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _instances.append(weakref.ref(self, _instances.remove))
        if offline():
            _readiness[self] = _Readiness(self)

    DistributedDataParallel._ddp_init_helper = prepared  # type: ignore[method-assign]


def will_synchronize() -> bool:
    """Whether the backward pass about to start contributes to the update (False inside `no_sync`)."""
    alive = instances()
    return not alive or any(instance.require_backward_grad_sync for instance in alive)


def is_replicated(module: torch.nn.Module) -> bool:
    """Whether `replicate(module)` was called: DDP from within the module's hooks, made at its first forward."""
    return any(replicate.state(one) is not None for one in module.modules())


def instances() -> list[Any]:
    """All that the script has made and still holds."""
    return [instance for one in list(_instances) if (instance := one()) is not None]


def may_pass_again() -> bool:
    """Whether one more pass than others make leaves all buckets as they are: they have been rebuilt, or never are."""
    return all(one._has_rebuilt_buckets or one.find_unused_parameters for one in instances())


def finish_bucket_phase(step: int) -> None:
    """Rebuild buckets as the survivors have, offline, after the newcomer's one offline body.

    Just before the step in whose forward the survivors rebuild, nothing is done: the newcomer does it there, live.
    """
    for instance in instances():
        readiness = _readiness.pop(instance, None)
        order = [] if readiness is None else readiness.stop()
        if instance.static_graph and step >= 2:
            _second_pass(instance, order)
        if step > passes_needed(instance):
            rebuild(instance)


def synchronized() -> list[torch.nn.Parameter]:
    """Parameters whose gradients the newest backward pass has made equal on all ranks."""
    return [p for instance in instances() if instance.require_backward_grad_sync for p in instance.parameters()]


def passes_needed(instance: Any) -> int:
    """Synchronized passes after which the order of the gradients is known: a static graph is learned in the first one,
    and the order only in the second."""
    return 2 if instance.static_graph else 1


def rebuild(instance: Any) -> None:
    """As DDP does at the start of each forward: rebuild the buckets once the order of the gradients is known."""
    if instance.reducer._rebuild_buckets():
        instance._has_rebuilt_buckets = True


def within(module: torch.nn.Module) -> list[Any]:
    """The DDP instances that are this module, or parts of it."""
    found = []
    for one in module.modules():
        state: Any = replicate.state(one)
        if isinstance(one, DistributedDataParallel):
            found.append(one)
        elif getattr(state, "_ddp", None) is not None:
            found.append(state._ddp)
    return found


def _second_pass(instance: Any, order: list[torch.nn.Parameter]) -> None:
    """Let the reducer see gradients (zeros) become ready in `order`, the order of the pass before."""
    reducer = instance.reducer
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    while order:
        # A parameter comes several times where activation checkpointing runs a backward pass within the backward pass.
        first = {id(parameter): i for i, parameter in reversed(list(enumerate(order)))}
        count = next((i for i, parameter in enumerate(order) if first[id(parameter)] < i), len(order))
        passing, order = order[:count], order[count:]
        with torch.enable_grad():
            total = torch.zeros((), device=passing[0].device)
            for parameter in reversed(passing):  # autograd takes first what was made last
                total = total + (parameter.sum() * 0).to(total)
        torch.autograd.Variable._execution_engine.run_backward(
            (total,), (torch.ones_like(total),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def layout() -> str:
    """A fingerprint of all bucket layouts; "" before they are final and without DDP.

    Call it where no backward pass is running: it takes the reducer's lock.
    """
    alive = instances()
    if not alive or not all(instance._has_rebuilt_buckets for instance in alive):
        return ""
    parts = []
    for instance in alive:
        instance.logger.set_runtime_stats_and_log()
        data = instance._get_ddp_logging_data()
        parts.append((data.get("rebuilt_bucket_sizes"), data.get("rebuilt_per_bucket_param_indices")))
    return hashlib.sha256(repr(sorted(map(repr, parts))).encode()).hexdigest()[:16]

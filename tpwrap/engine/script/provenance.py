"""Where tensors come from, in a newcomer between its last backward pass and the end of that update.

The failed rank may have read values there that are on no tape, because it contributed to the update before it could
publish them. What is needed to answer depends on what a tensor was computed from: weights and synchronized gradients
are equal on all ranks, so any survivor has read the same value; what the newcomer was given at the backward pass
(losses, running sums) is true, and its own computation with it, too; anything else is lost.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode


class Origin(enum.Enum):
    OWN = "own"
    """given to the newcomer, or computed from that, or from nothing"""
    REPLICATED = "replicated"
    """computed from weights or gradients"""
    LOST = "lost"
    """only the failed rank had it"""


class Provenance(TorchFunctionMode):
    """Follows tensors through torch's functions while it is active.

    synchronized: of the `replicated` parameters those whose gradients are equal on all ranks, too; other gradients are
    lost. skip: whether to pass over what is called now. default: of tensors that nobody has marked.
    """

    def __init__(
        self,
        own: Iterable[torch.Tensor],
        replicated: Sequence[torch.Tensor],
        synchronized: Iterable[torch.Tensor],
        default: Origin = Origin.LOST,
        skip: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._default = default
        self._skip = skip
        self._idle = False
        self._origins: dict[int, Origin] = {}
        self._kept: list[Any] = []  # the memory behind a number must not be given to others
        for tensor in own:
            self.mark(tensor, Origin.OWN)
        self._gradients = {id(tensor): Origin.LOST for tensor in replicated}
        self._gradients.update((id(tensor), Origin.REPLICATED) for tensor in synchronized)
        for tensor in replicated:
            self.mark(tensor, Origin.REPLICATED if default is Origin.LOST else default)

    def start(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> bool:
        """Follow no more. False if this is called from within a function of torch that is being followed (backward() is
        one): call it again from elsewhere, so that the mode can be taken off torch's stack."""
        self._idle = True
        self._origins.clear()
        self._kept.clear()
        if _get_current_function_mode() is not self:
            return False
        self.__exit__(None, None, None)
        return True

    def mark(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Of the tensor, and of all others that share its memory."""
        self._kept.append(tensor.untyped_storage() if tensor.layout is torch.strided else tensor)
        self._origins[_memory(tensor)] = origin

    def reduced(self, tensor: torch.Tensor) -> None:
        """A collective has made it equal on all ranks. What else lies in its memory need not be."""
        if _whole(tensor) or self.known(tensor) is not Origin.LOST:
            self.mark(tensor, Origin.REPLICATED)

    def known(self, tensor: torch.Tensor) -> Origin | None:
        """What is known of this very tensor."""
        return self._origins.get(_memory(tensor))

    def origin(self, *values: Any) -> Origin:
        """Of what is computed from `values`."""
        origins = {self._origins.get(_memory(tensor), self._default) for tensor in _tensors(values)}
        if Origin.LOST in origins:
            return Origin.LOST
        return Origin.REPLICATED if Origin.REPLICATED in origins else Origin.OWN

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._idle or self._skip():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        origin = self.origin(args, kwargs)
        if name in _OVERWRITE and _whole(args[0]):
            origin = self.origin(args[1:], kwargs)
        result = func(*args, **kwargs)
        if func == _GRADIENT and id(args[0]) in self._gradients and result is not None:
            origin = self.known(result) or self._gradients[id(args[0])]
        changed = args[:1] if name in _RETURN_NOTHING else ()
        for tensor in _tensors((result, *changed)):
            self.mark(tensor, origin)
        return result


_OVERWRITE = ("copy_", "zero_", "fill_")
_RETURN_NOTHING = ("__setitem__", "__set__")
"""what changes its first argument and does not return it"""
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__


def _whole(tensor: torch.Tensor) -> bool:
    """Whether nothing else lies in the same memory."""
    try:
        return tensor.nbytes == tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return False


def _memory(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    try:
        cdata: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse ones have none
        return id(tensor)
    return cdata


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from _tensors(value)

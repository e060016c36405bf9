"""What a replica can give to a newcomer: parameters, optimizer state, and the scalars around them.

Tensors are named, so that source and newcomer agree without exchanging objects: `<model>/<parameter>`,
`<optimizer>/<group>.<position>/<key>` and `extra/<name>`. Of a DTensor it is the local piece: replicas hold the same
pieces. Scalars (learning rates and all other param_group entries, scheduler state, optimizer entries that are no
tensors) move by value. Buffers are not among them: they differ from rank to rank. Gradients are neither: after an
update they are used up, unless the script names them as extra tensors.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tpwrap.engine import encoding, pieces
from tpwrap.engine.dtensors import is_dtensor, local
from tpwrap.engine.scalars import (
    Refused,
    StateError,
    optimized,
    pack_object,
    pack_optimizer,
    restore_object,
    restore_optimizer,
)

__all__ = ["Entry", "ReplicaState", "StateError", "combined", "loaded"]

EXTRA = "extra"
PARAMETER = ".parameter"
"""no optimizer names an entry of its state so"""


class Entry(NamedTuple):
    """A tensor, as a source describes it."""

    name: str
    dtype: str
    shape: list[int]
    beside: bool
    """it lives where its parameter lives; False: on the CPU (a step counter, unless the optimizer is capturable)"""
    piece: bool = False
    """it is the local piece of a DTensor"""


def loaded(module: str, name: str) -> Any:
    """That class, for isinstance, if the script has imported its module: an import would take seconds."""
    return getattr(sys.modules.get(module), name, ())


class ReplicaState:
    """The replicated state behind a session. All methods expect that nobody changes it meanwhile (commit gate)."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any | None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        schedulers = {} if scheduler is None else {"scheduler": scheduler}
        optimizers = {"optimizer": optimizer}
        if isinstance(optimizer, loaded("torch.distributed.optim", "ZeroRedundancyOptimizer")):
            optimizers["partition"] = optimizer.optim  # which has the state
        self._hold({"model": model}, optimizers, schedulers, dict)

    @classmethod
    def of(
        cls,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        schedulers: Mapping[str, Any],
        tensors: Callable[[], Mapping[str, torch.Tensor]] = dict,
        known: Mapping[str, dict[str, torch.nn.Parameter]] | None = None,
    ) -> ReplicaState:
        """The state of several models and optimizers, whose names, and their order, are equal on all replicas.

        schedulers: objects with `state_dict` and `load_state_dict` whose state is small (schedulers, scalers).
        tensors: further replicated tensors by name, always the same objects; a newcomer's are written into.
        known: the parameters of each model by name, from before its first forward pass; None: this is before it.
        Raises ValueError for a name that is used twice, is `extra`, or has a slash.
        """
        names = [*models, *optimizers]
        for name in names:
            if names.count(name) > 1 or name == EXTRA or "/" in name:
                raise ValueError(f"{name!r} cannot name a model or an optimizer: it is used twice, reserved, or a path")
        state = cls.__new__(cls)
        state._hold(dict(models), dict(optimizers), dict(schedulers), tensors, known)
        return state

    def _hold(
        self,
        models: dict[str, torch.nn.Module],
        optimizers: dict[str, torch.optim.Optimizer],
        schedulers: dict[str, Any],
        extra: Callable[[], Mapping[str, torch.Tensor]],
        known: Mapping[str, dict[str, torch.nn.Parameter]] | None = None,
    ) -> None:
        self.models = models
        self.optimizers = optimizers
        self.schedulers = schedulers
        self._extra = extra
        self._known = known or {name: dict(model.named_parameters()) for name, model in models.items()}

    @functools.cached_property
    def _fixed(self) -> set[str]:
        """Models that FSDP2 shards. Found when first asked for: scripts as they are make a state at every update."""
        sharded = loaded("torch.distributed.fsdp", "FSDPModule")
        return {name for name, one in self.models.items() if any(isinstance(m, sharded) for m in one.modules())}

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter once, by name.

        Those that the models had at first, because some take theirs out: FSDP2 puts gathered ones in their place during
        a forward pass (a recovery may come then), and DDP over tensor parallelism loose tensors at the first one. Then
        those that came later, and what optimizers update without any model showing it.
        """
        seen: set[int] = set()
        for model_name, model in self.models.items():
            now = {} if model_name in self._fixed else dict(model.named_parameters())
            for name, parameter in (self._known[model_name] | now).items():
                if id(parameter) not in seen:  # a wrapper and the module inside; encoders that models share
                    seen.add(id(parameter))
                    yield f"{model_name}/{name}", parameter
        for optimizer_name, optimizer in self.optimizers.items():
            for place, parameter in optimized(optimizer):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{optimizer_name}/{place}/{PARAMETER}", parameter

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every replicated tensor by name, in an order that is equal on all replicas."""
        return {name: tensor for name, tensor, _, _ in self._tensors()}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, bool, bool]]:
        """(name, tensor, whether it lives where its parameter lives, whether it is the local piece of a DTensor)."""
        for name, parameter in self.parameters():
            yield name, local(parameter), True, is_dtensor(parameter)
        for optimizer_name, optimizer in self.optimizers.items():
            for place, parameter in optimized(optimizer):
                for key, value in optimizer.state.get(parameter, {}).items():  # a newcomer's gets this order, too
                    if isinstance(value, torch.Tensor):
                        beside = value.is_cpu == parameter.is_cpu
                        yield f"{optimizer_name}/{place}/{key}", local(value), beside, is_dtensor(value)
        for name, tensor in sorted(self._extra().items()):
            yield f"{EXTRA}/{name}", local(tensor), True, is_dtensor(tensor)

    def digests(self) -> dict[str, str]:
        return pieces.digests(self.tensors())

    def scalars(self) -> bytes:
        """Encoded scalars; taken at every commit, because a scheduler changes them right after it."""
        refused: Refused = {}
        optimizers = {name: pack_optimizer(name, o, refused) for name, o in self.optimizers.items()}
        schedulers = {name: pack_object(name, s, refused) for name, s in self.schedulers.items()}
        return encoding.encode_packed({"optimizers": optimizers, "schedulers": schedulers, "refused": refused})

    def restore_scalars(self, data: bytes) -> None:
        """Raises StateError where the optimizers and schedulers are others than the source's, or the source holds
        something that cannot be moved."""
        scalars = encoding.decode(data)
        for name, kind in scalars["refused"].items():
            raise StateError(f"{name} of the replicas is a {kind}, which cannot be moved")
        for kind, mine in (("optimizers", self.optimizers), ("schedulers", self.schedulers)):
            if mine.keys() != scalars[kind].keys():
                raise StateError(f"the {kind} are {_list(mine)} here, but {_list(scalars[kind])} on the replicas")
        for name, optimizer in self.optimizers.items():
            restore_optimizer(name, optimizer, scalars["optimizers"][name])
        for name, scheduler in self.schedulers.items():
            restore_object(name, scheduler, scalars["schedulers"][name])

    def allocate(self, manifest: list[Entry]) -> None:
        """Create optimizer state that the source has and we do not (it is made lazily, in the first real step), and
        drop what only we have. Raises StateError when anything else differs."""
        mine = self.tensors()
        parameters = {
            f"{name}/{place}": (optimizer.state, parameter)
            for name, optimizer in self.optimizers.items()
            for place, parameter in optimized(optimizer)
        }
        wanted = {entry.name for entry in manifest}
        for name, dtype, shape, beside, piece in manifest:
            have = mine.get(name)
            if have is not None and list(have.shape) == shape and encoding.dtype_name(have.dtype) == dtype:
                continue
            place, _, key = name.rpartition("/")
            if place not in parameters:
                what = "is missing here" if have is None else f"is {list(have.shape)} {have.dtype} here"
                raise StateError(f"{name} {what}, but {shape} {dtype} on its replicas")
            state, parameter = parameters[place]
            kind, device = encoding.dtype_of(dtype), parameter.device if beside else torch.device("cpu")
            if piece or shape == list(parameter.shape):
                made = torch.empty_like(parameter, dtype=kind, device=device, requires_grad=False)
            else:
                made = torch.empty(shape, dtype=kind, device=device)
            state[parameter][sys.intern(key)] = made  # pickle writes equal keys once only if they are the same object
        for name in mine.keys() - wanted:
            place, _, key = name.rpartition("/")
            if place not in parameters:
                raise StateError(f"{name} exists here but not on its replicas")
            state, parameter = parameters[place]
            del state[parameter][key]

    def manifest(self) -> list[Entry]:
        return [
            Entry(name, encoding.dtype_name(tensor.dtype), list(tensor.shape), beside, piece)
            for name, tensor, beside, piece in self._tensors()
        ]


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"


def combined(digests: dict[str, str], scalars: bytes) -> str:
    """One digest over all tensors (`ReplicaState.digests`) and scalars: equal on all replicas at the same step."""
    total = hashlib.sha256(scalars)
    for name, digest in sorted(digests.items()):
        total.update(f"{name}={digest}\n".encode())
    return total.hexdigest()[:32]

"""What a replica can give to a newcomer: parameters, optimizer state, and the scalars around them.

Tensors are named, so that source and newcomer agree without exchanging objects:
`model/<parameter>` and `optimizer/<group>.<position>/<key>`. Scalars (learning rates and all other param_group
entries, scheduler state, optimizer entries that are no tensors) move by value.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch

from tpwrap.engine import _native, encoding


class StateError(RuntimeError):
    """Source and newcomer do not hold the same set of state."""


class ReplicaState:
    """The replicated state behind a session. All methods expect that nobody changes it meanwhile (commit gate)."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any | None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every replicated tensor by name, in an order that is equal on all replicas."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[f"model/{name}"] = parameter.detach()
        for place, parameter in self._optimized():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    found[f"optimizer/{place}/{key}"] = value.detach()
        return found

    def digests(self) -> dict[str, str]:
        tensors = self.tensors()
        return dict(zip(tensors, _native.digests(list(tensors.values())), strict=True))

    def scalars(self) -> bytes:
        """Encoded scalars; taken at every commit, because a scheduler changes them right after it."""
        groups, entries, graded = [], {}, []
        state = self.optimizer.state
        for g, group in enumerate(self.optimizer.param_groups):
            groups.append(encoding.packed_items({key: value for key, value in group.items() if key != "params"}))
            for p, parameter in enumerate(group["params"]):
                graded.append(parameter.grad is not None)
                values = {k: v for k, v in state.get(parameter, {}).items() if not isinstance(v, torch.Tensor)}
                if values:
                    entries[f"{g}.{p}"] = encoding.packed_items(dict(sorted(values.items())))
        scheduler = None if self.scheduler is None else encoding.packed_items(self.scheduler.state_dict())
        return encoding.encode_packed(
            {"groups": groups, "entries": entries, "scheduler": scheduler, "graded": bytes(graded)}
        )

    def restore_scalars(self, data: bytes) -> None:
        """Raises StateError where the optimizer has other param_groups than the source's."""
        scalars = encoding.decode(data)
        if len(scalars["groups"]) != len(self.optimizer.param_groups):
            raise StateError(
                f"the optimizer has {len(self.optimizer.param_groups)} param_groups here and "
                f"{len(scalars['groups'])} on its replicas"
            )
        for group, values in zip(self.optimizer.param_groups, scalars["groups"], strict=True):
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # the tensor may be captured elsewhere
                else:
                    group[key] = value
        parameters = dict(self._optimized())
        # What this step has not used has no gradient, and the optimizer passes over it; or one that was zeroed in place
        # after an earlier step, and the optimizer goes on with its momentum.
        for graded, parameter in zip(scalars["graded"], parameters.values(), strict=True):
            if not graded:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for place, values in scalars["entries"].items():
            self.optimizer.state[parameters[place]].update(values)
        if self.scheduler is not None and scalars["scheduler"] is not None:
            self.scheduler.load_state_dict(copy.deepcopy(scalars["scheduler"]))

    def allocate(self, manifest: list[tuple[str, str, list[int]]]) -> None:
        """Create optimizer state that the source has and we do not (it is made lazily, in the first real step), and
        drop what only we have. Raises StateError when the model itself differs."""
        mine = self.tensors()
        parameters = dict(self._optimized())
        wanted = {name for name, _, _ in manifest}
        for name, dtype, shape in manifest:
            have = mine.get(name)
            fits = have is not None and list(have.shape) == shape and encoding.dtype_name(have.dtype) == dtype
            if fits:
                continue
            part, place, key = [*name.split("/", 2), "", ""][:3]
            if part != "optimizer" or place not in parameters:
                what = "is missing here" if have is None else f"is {list(have.shape)} {have.dtype} here"
                raise StateError(f"{name} {what}, but {shape} {dtype} on its replicas")
            parameter = parameters[place]
            # A step counter lives on the CPU whatever the parameter's device, unless the optimizer is capturable.
            device = parameter.device if shape == list(parameter.shape) or self._capturable() else "cpu"
            self.optimizer.state[parameter][key] = torch.empty(shape, dtype=encoding.dtype_of(dtype), device=device)
        for name in mine.keys() - wanted:
            part, place, key = [*name.split("/", 2), "", ""][:3]
            if part == "model":
                raise StateError(f"{name} exists here but not on its replicas")
            del self.optimizer.state[parameters[place]][key]

    def manifest(self) -> list[tuple[str, str, list[int]]]:
        """(name, dtype, shape) of every tensor."""
        return [(n, encoding.dtype_name(t.dtype), list(t.shape)) for n, t in self.tensors().items()]

    def _optimized(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [
            (f"{g}.{p}", parameter)
            for g, group in enumerate(self.optimizer.param_groups)
            for p, parameter in enumerate(group["params"])
        ]

    def _capturable(self) -> bool:
        return any(bool(group.get("capturable")) for group in self.optimizer.param_groups)


def combined(digests: dict[str, str], scalars: bytes) -> str:
    """One digest over all tensors (`ReplicaState.digests`) and scalars: equal on all replicas at the same step."""
    total = hashlib.sha256(scalars)
    for name, digest in digests.items():
        total.update(f"{name}={digest}\n".encode())
    return total.hexdigest()[:32]

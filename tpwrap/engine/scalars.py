"""The replicated state that moves by value: what optimizers hold beside tensors, and whole schedulers and scalers.

Packing is done at every commit and must be cheap; it never fails. What cannot be encoded is told to the newcomer, which
then refuses to go on without it: the training itself does not need it. Code (a scheduler's functions) is not state: the
script has made the same in the newcomer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from tpwrap.engine import encoding


class StateError(RuntimeError):
    """Source and newcomer do not hold the same set of state."""


Refused: TypeAlias = dict[str, str]
"""what cannot be moved: its name, and its type"""


def _interned(key: Any) -> Any:
    """pickle writes equal keys once only if they are the same object."""
    return sys.intern(key) if isinstance(key, str) else key


def optimized(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of `optimizer` by place: `<group>.<position>`."""
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            yield f"{g}.{p}", parameter


def pack_optimizer(name: str, optimizer: torch.optim.Optimizer, refused: Refused) -> dict[str, Any]:
    """param_groups; entries of the state that are no tensors; which parameters have a gradient."""
    groups, entries, graded = [], {}, []
    state = optimizer.state
    tensor = torch.Tensor
    stateful = 0
    for g, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        packed = encoding.packed_items(settings)
        groups.append(packed)
        if len(packed) != len(settings):
            _refuse(f"{name}/{g}", {k: v for k, v in settings.items() if not _is_code(v)}, packed, refused)
        for p, parameter in enumerate(group["params"]):
            graded.append(parameter.grad is not None)
            own = state.get(parameter)
            if own is None:
                continue
            stateful += 1
            values = {}
            for key, value in own.items():  # no comprehension: a call for every parameter
                if not isinstance(value, tensor):
                    values[key] = value  # noqa: PERF403
            if values:
                entries[f"{g}.{p}"] = packed = encoding.packed_items(dict(sorted(values.items())))
                if len(packed) != len(values):
                    _refuse(f"{name}/{g}.{p}", values, packed, refused)
    shared = {}
    if stateful != len(state):  # some optimizers keep entries of their own between those of the parameters
        values = {key: state[key] for key in _shared(state)}
        shared = encoding.packed_items(values)
        _refuse(name, values, shared, refused)
    # Set while a gradient scaler calls an optimizer that skips infinite gradients by itself.
    skipped = bool(getattr(optimizer, "found_inf", 0))
    return {"groups": groups, "entries": entries, "shared": shared, "graded": bytes(graded), "skipped": skipped}


def restore_optimizer(name: str, optimizer: torch.optim.Optimizer, scalars: dict[str, Any]) -> None:
    """Set `optimizer` to what `pack_optimizer` packed. Raises StateError where it has other param_groups."""
    parameters = dict(optimized(optimizer))
    groups = optimizer.param_groups
    if len(scalars["groups"]) != len(groups):
        raise StateError(f"the {name} has {len(groups)} param_groups here and {len(scalars['groups'])} on its replicas")
    if len(scalars["graded"]) != len(parameters):
        raise StateError(
            f"the {name} has {len(parameters)} parameters here and {len(scalars['graded'])} on its replicas"
        )
    for group, values in zip(groups, scalars["groups"], strict=True):
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)  # the tensor may be captured elsewhere
            else:
                group[key] = value
    # What this step has not used has no gradient, and the optimizer passes over it; or one that was zeroed in place
    # after an earlier step, and the optimizer goes on with its momentum.
    for graded, parameter in zip(scalars["graded"], parameters.values(), strict=True):
        if not graded:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for place, parameter in parameters.items():
        values = scalars["entries"].get(place, {})
        own = optimizer.state.get(parameter, {})
        for key in [k for k, v in own.items() if not isinstance(v, torch.Tensor) and k not in values]:
            del own[key]
        if values:
            optimizer.state[parameter].update({_interned(k): _moved(v, parameter.device) for k, v in values.items()})
    for key in _shared(optimizer.state):
        del optimizer.state[key]
    optimizer.state.update(scalars["shared"])


def pack_object(name: str, value: Any, refused: Refused, inside: tuple[int, ...] = ()) -> dict[str, Any]:
    """The `state_dict()` of a scheduler, a scaler, or the like; and of such objects that it holds inside."""
    items = value.state_dict()
    packed = encoding.packed_items(items)
    parts = {}
    if len(packed) != len(items):
        rest = {k: v for k, v in items.items() if k not in packed and not _is_code(v)}
        for key, item in rest.items():
            within = getattr(value, key, None) is item and id(item) not in inside
            if within and hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
                parts[key] = pack_object(f"{name}/{key}", item, refused, (*inside, id(value)))
        _refuse(name, rest, parts, refused)
    return {"own": packed, "parts": parts}


def restore_object(name: str, value: Any, scalars: dict[str, Any]) -> None:
    """Set `value` to what `pack_object` packed. Raises StateError when it does not take it."""
    try:
        value.load_state_dict(scalars["own"])
        for key, part in scalars["parts"].items():
            restore_object(f"{name}/{key}", getattr(value, key), part)
    except StateError:
        raise
    except Exception as error:
        raise StateError(f"{name} did not take the state of its replicas: {error!r}") from error


def _shared(state: Mapping[Any, Any]) -> list[Any]:
    return [key for key in state if isinstance(key, str)]


def _refuse(name: str, values: Mapping[str, Any], packed: Mapping[str, Any], refused: Refused) -> None:
    for key, value in values.items():
        if key not in packed:
            refused[f"{name}/{key}"] = type(value).__name__


def _is_code(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_code, value))
    if isinstance(value, dict):
        return all(map(_is_code, value.values()))
    return value is None or callable(value) or isinstance(value, torch.optim.Optimizer)


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors within containers (LBFGS keeps lists of them) live where their parameter lives."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(v, device) for v in value)
    if isinstance(value, dict):
        return {k: _moved(v, device) for k, v in value.items()}
    return value

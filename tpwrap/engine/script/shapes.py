"""The structure of a batch or of a model's output: tensors by dtype and shape, everything else by value.

`describe` turns it into plain data for the tape, `stub` makes something of the same structure again, with zeros.
"""

from __future__ import annotations

import copyreg
import enum
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from tpwrap.engine import encoding
from tpwrap.engine.script.tape import LARGEST

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, np.ndarray})


_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", torch.Size: "size"}
_MADE: dict[str, Any] = {name: kind for kind, name in _SEQUENCES.items()}


class Indescribable(TypeError):
    """The structure holds an object that cannot be made again elsewhere."""


def describe(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Plain data for `stub`. seen: tensors described so far, by identity. Raises Indescribable."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        if id(value) in seen:
            return ("same", seen[id(value)])
        if value.layout is not torch.strided:
            raise Indescribable(f"a {value.layout} tensor")
        seen[id(value)] = len(seen)
        gradient = 0 if not value.requires_grad else 1 if value.is_leaf else 2
        return ("tensor", encoding.dtype_name(value.dtype), list(value.shape), gradient, str(value.device))
    kind = type(value)
    if kind in _PLAIN or isinstance(value, np.generic):
        return ("plain", value)
    if kind in _SEQUENCES:
        return (_SEQUENCES[kind], [describe(v, seen) for v in value])
    if kind is dict:
        return ("dict", [(describe(k, seen), describe(v, seen)) for k, v in value.items()])
    name = (kind.__module__, kind.__qualname__)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ("named", *name, [describe(v, seen) for v in value])
    if isinstance(value, enum.Enum) and isinstance(value.name, str):
        return ("member", *name, value.name)
    if _is_all_attributes(kind) and "<locals>" not in name[1] and not isinstance(value, torch.nn.Module):
        items = None
        if isinstance(value, dict):
            items = [(describe(k, seen), describe(v, seen)) for k, v in value.items()]
        return ("object", *name, items, [(k, describe(v, seen)) for k, v in vars(value).items()])
    raise Indescribable(f"a {kind.__module__}.{kind.__qualname__}")


def stub(description: Any, made: list[torch.Tensor] | None = None) -> Any:
    """Something of the structure that `describe` saw; tensors are zeros. made: those so far. Raises Indescribable."""
    made = [] if made is None else made
    code, *rest = description
    if code == "tensor":
        dtype, shape, gradient, device = rest
        tensor = torch.zeros(shape, dtype=encoding.dtype_of(dtype), device=device, requires_grad=gradient > 0)
        if gradient > 1:  # not a leaf: the script may change it in place
            with torch.enable_grad():
                tensor = tensor.clone()
        made.append(tensor)
        return tensor
    if code == "same":
        return made[rest[0]]
    if code == "plain":
        return rest[0]
    if code == "dict":
        return {stub(k, made): stub(v, made) for k, v in rest[0]}
    if code in _MADE:
        return _MADE[code](stub(v, made) for v in rest[0])
    module, qualname, *content = rest
    kind: Any = sys.modules.get(module)
    for part in qualname.split("."):
        kind = getattr(kind, part, None)
    if not isinstance(kind, type):
        raise Indescribable(f"{module}.{qualname}, which is not there")
    if code == "named":
        return kind(*(stub(v, made) for v in content[0]))
    if code == "member":
        return kind[content[0]]  # type: ignore[index]
    items, attributes = content
    return _object(kind, items, attributes, made)


def _is_all_attributes(kind: type) -> bool:
    """Whether objects of this type hold nothing but attributes in a dictionary, and entries if they are one."""
    if not getattr(kind, "__dictoffset__", 0):
        return False
    base = next(one for one in kind.__mro__ if not one.__flags__ & _MADE_BY_CLASS)
    return base in (object, dict, OrderedDict) and not copyreg._slotnames(kind)  # type: ignore[attr-defined]


_MADE_BY_CLASS = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: other types keep what they hold where only they know"""


def _object(kind: Any, items: Any, attributes: Any, made: list[torch.Tensor]) -> Any:
    """An object with these entries, if it is a dictionary, and attributes, without calling its constructor."""
    if items is None:
        created = object.__new__(kind)
    else:
        created = kind.__new__(kind)
        base = OrderedDict if issubclass(kind, OrderedDict) else dict
        for key, value in items:
            base.__setitem__(created, stub(key, made), stub(value, made))
    vars(created).update({name: stub(value, made) for name, value in attributes})
    return created


class Table:
    """Descriptions by number: most batches of a training have the same structure, and only its number is recorded."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._known: list[Any] = []

    def number(self, value: Any) -> Any:
        """The description's number, with the description where it is new. Raises Indescribable."""
        try:
            description = describe(value)
        except RecursionError:
            raise Indescribable("a structure that holds itself") from None
        try:
            key = encoding.encode(description)
        except TypeError as error:
            raise Indescribable(str(error)) from None
        if len(key) > LARGEST:
            raise Indescribable(f"{len(key) / 1e6:.0f} MB that are no tensors")
        if len(key) > _LONGEST:
            return (-1, description)
        number = self._numbers.get(key)
        if number is not None:
            return number
        self._numbers[key] = len(self._numbers)
        return (self._numbers[key], description)

    def look_up(self, recorded: Any) -> Any:
        """The description that `number` gave this for."""
        if isinstance(recorded, int):
            return self._known[recorded]
        number, description = recorded
        if number >= 0:
            key = encoding.encode(description)
            self._numbers[key] = number
            self._known.append(description)
        return description


_LONGEST = 2048
"""bytes; a longer description holds values (texts, say) that hardly come twice"""

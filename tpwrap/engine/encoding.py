"""A safe encoding for small state: plain data, NumPy arrays and tensors, as msgpack.

Never pickle: these bytes come over the network, and unpickling runs code. What cannot be encoded is refused when it
is registered or published, with its place named, not when a newcomer needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from tpwrap.engine.dtensors import local

_TENSOR, _ARRAY, _TUPLE, _SET, _BIGINT, _COMPLEX = 1, 2, 3, 4, 5, 6
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    return _DTYPES[name]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a strided tensor in row-major order, any device, any dtype; of a DTensor those that are here."""
    flat = local(tensor).cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_from(data: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype_of(dtype))
    return torch.frombuffer(bytearray(data), dtype=dtype_of(dtype)).reshape(shape)


def encode(value: Any) -> bytes:
    """Encode `value`. Raises TypeError that names the place of what cannot be encoded."""
    return msgspec.msgpack.encode(_pack(value, None))


def packed_items(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of `values` can be encoded, for `encode_packed`. (A scheduler's state may hold functions.)"""
    found = {}
    for key, value in values.items():
        try:
            found[key] = _pack(value, None)
        except TypeError:
            continue
    return found


def encode_packed(value: Any) -> bytes:
    """Encode lists, dicts and bytes around results of `packed_items`."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes) -> Any:
    """The value that `encode` was given. Raises msgspec.DecodeError on anything else."""
    return _unpack(msgspec.msgpack.decode(data))


def _extension(code: int, *parts: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts))


# Where a value stands: the place of its container, and its key there. Only an error spells it out.
_Place: TypeAlias = "tuple[_Place, object] | None"
_AS_IS = frozenset({type(None), bool, str, bytes, float})


def _pack(value: Any, where: _Place) -> Any:
    kind = type(value)
    if kind in _AS_IS:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else _extension(_BIGINT, str(value))
    if kind is list:
        return [v if type(v) in _AS_IS else _pack(v, (where, i)) for i, v in enumerate(value)]
    if kind is tuple:
        return _extension(_TUPLE, [_pack(v, (where, i)) for i, v in enumerate(value)])
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"{_spell(where)}: a {value.layout} tensor cannot be encoded; register a dense one")
        piece = local(value)
        return _extension(_TENSOR, dtype_name(piece.dtype), list(piece.shape), tensor_bytes(piece))
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError(f"{_spell(where)}: an array of Python objects cannot be encoded; register plain data")
        scalar = isinstance(value, np.generic)
        return _extension(_ARRAY, array.dtype.str, list(array.shape), array.tobytes(), scalar)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(f"{_spell(where)}: dictionary key {key!r} is neither str nor int")
        return {key: v if type(v) in _AS_IS else _pack(v, (where, key)) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return _pack(list(value) if isinstance(value, list) else tuple(value), where)
    if isinstance(value, (set, frozenset)):
        return _extension(_SET, [_pack(v, (where, _IN_SET)) for v in sorted(value, key=repr)])
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return _extension(_COMPLEX, value.real, value.imag)
    raise TypeError(
        f"{_spell(where)}: {kind.__name__} cannot be encoded; use None, bool, int, float, str, bytes, list, tuple, "
        "set, dict, NumPy arrays or tensors"
    )


_IN_SET = object()


def _spell(where: _Place) -> str:
    if where is None:
        return "value"
    container, key = where
    return _spell(container) + ("{}" if key is _IN_SET else f"[{key!r}]")


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    if isinstance(value, dict):
        return {key: _unpack(v) for key, v in value.items()}
    if not isinstance(value, msgspec.msgpack.Ext):
        return value
    parts = msgspec.msgpack.decode(value.data)
    if value.code == _TENSOR:
        dtype, shape, data = parts
        return tensor_from(data, dtype, shape)
    if value.code == _ARRAY:
        dtype, shape, data, scalar = parts
        array = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
        return array[()] if scalar else array
    if value.code == _TUPLE:
        return tuple(_unpack(v) for v in parts[0])
    if value.code == _SET:
        return {_unpack(v) for v in parts[0]}
    if value.code == _BIGINT:
        return int(parts[0])
    if value.code == _COMPLEX:
        return complex(*parts)
    raise msgspec.DecodeError(f"unknown extension {value.code}")

"""A safe encoding for small state: plain data, NumPy arrays and tensors, as msgpack.

Never pickle: these bytes come over the network, and unpickling runs code. What cannot be encoded is refused when it
is registered or published, with its place named, not when a newcomer needs it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

_TENSOR, _ARRAY, _TUPLE, _SET, _BIGINT, _COMPLEX = 1, 2, 3, 4, 5, 6
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    return _DTYPES[name]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a strided tensor in row-major order, any device, any dtype."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_from(data: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype_of(dtype))
    return torch.frombuffer(bytearray(data), dtype=dtype_of(dtype)).reshape(shape)


def encode(value: Any) -> bytes:
    """Encode `value`. Raises TypeError that names the place of what cannot be encoded."""
    return msgspec.msgpack.encode(_pack(value, "value"))


def decode(data: bytes) -> Any:
    """The value that `encode` was given. Raises msgspec.DecodeError on anything else."""
    return _unpack(msgspec.msgpack.decode(data))


def _extension(code: int, *parts: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts))


def _pack(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, str, bytes)) or type(value) is float:
        return value
    if type(value) is int:
        return value if -(1 << 63) <= value < 1 << 63 else _extension(_BIGINT, str(value))
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"{where}: a {value.layout} tensor cannot be encoded; register a dense one")
        return _extension(_TENSOR, dtype_name(value.dtype), list(value.shape), tensor_bytes(value))
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError(f"{where}: an array of Python objects cannot be encoded; register plain data")
        scalar = isinstance(value, np.generic)
        return _extension(_ARRAY, array.dtype.str, list(array.shape), array.tobytes(), scalar)
    if isinstance(value, tuple):
        return _extension(_TUPLE, [_pack(v, f"{where}[{i}]") for i, v in enumerate(value)])
    if isinstance(value, list):
        return [_pack(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return _extension(_SET, [_pack(v, f"{where}{{}}") for v in sorted(value, key=repr)])
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(f"{where}: dictionary key {key!r} is neither str nor int")
        return {key: _pack(v, f"{where}[{key!r}]") for key, v in value.items()}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return _extension(_COMPLEX, value.real, value.imag)
    raise TypeError(
        f"{where}: {type(value).__name__} cannot be encoded; use None, bool, int, float, str, bytes, list, tuple, "
        "set, dict, NumPy arrays or tensors"
    )


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

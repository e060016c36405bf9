"""Random number generators of this process: Python, NumPy, torch on the CPU and on its accelerator.

States are kept as bytes: they are taken twice a step, and bytes cost least to copy, compare and send. Python and NumPy
hand out a state only as 624 objects, made one by one, which takes longer than all else that a step is charged for; so
the words are read where the generator has them in memory. Where that place is, is found at import by looking for a
known state in a generator of our own, and checked against what the generator says; if it is not found, the generators
are asked.
"""

from __future__ import annotations

import ctypes
import random
import struct
from array import array
from typing import Any, NamedTuple

import numpy as np
import torch

_WORDS = 624
_STATE = 4 * (_WORDS + 1)
"""bytes of a Mersenne twister: its words and the index of the next one"""
_GAUSS = struct.Struct("@id")
"""NumPy's second normal number: whether there is one, and which"""


class State(NamedTuple):
    """Everything that decides what the global generators draw next (about 10 kB)."""

    python: bytes
    """index, words"""
    python_gauss: float | None
    """of the pair of normal numbers that are drawn at once, the second one"""
    numpy: bytes
    """words, index"""
    numpy_gauss: float | None
    torch: bytes
    cuda: bytes | None


_last = State(b"", None, b"", None, b"", None)


def capture() -> State:
    """The state of every global generator. What has not changed since the last time is the same object."""
    global _last
    python, python_gauss = _python()
    numpy, numpy_gauss = _numpy()
    torch_state, cuda = _bytes(torch.get_rng_state()), None
    if torch.cuda.is_initialized():
        cuda = _bytes(torch.cuda.get_rng_state())
    last = _last
    _last = State(
        last.python if python == last.python else python,
        python_gauss,
        last.numpy if numpy == last.numpy else numpy,
        numpy_gauss,
        last.torch if torch_state == last.torch else torch_state,
        cuda,
    )
    return _last


def restore(state: State) -> None:
    """Set every generator to what `capture` saw."""
    restore_python((state.python, state.python_gauss))
    restore_numpy((state.numpy, state.numpy_gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))
    if state.cuda is not None:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.cuda), dtype=torch.uint8))


def python_state() -> tuple[bytes, float | None]:
    """What decides what `random` draws next."""
    return _python()


def numpy_state() -> tuple[bytes, float | None]:
    """What decides what `numpy.random` draws next."""
    return _numpy()


def restore_python(state: tuple[bytes, float | None]) -> None:
    words = array("I", state[0])
    random.setstate((3, (*words[1:], words[0]), state[1]))


def restore_numpy(state: tuple[bytes, float | None]) -> None:
    keys = np.frombuffer(state[0], dtype=np.uint32)
    np.random.set_state(("MT19937", keys[:-1], int(keys[-1]), int(state[1] is not None), state[1] or 0.0))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


# --- Python -------------------------------------------------------------------------------------------


def _ask_python(generator: random.Random) -> tuple[bytes, float | None]:
    _, words, gauss = generator.getstate()
    return array("I", (words[-1], *words[:-1])).tobytes(), gauss


def _read_python(generator: random.Random, offset: int) -> tuple[bytes, float | None]:
    return ctypes.string_at(id(generator) + offset, _STATE), generator.gauss_next  # type: ignore[attr-defined]


def _find_python() -> int | None:
    """Where in a `random.Random` its state stands."""
    generator = random.Random(1)
    generator.gauss(0.0, 1.0)
    offset = _memory(generator).find(_ask_python(generator)[0])
    generator.seed(2)
    found = offset >= 0 and _read_python(generator, offset) == _ask_python(generator)
    return offset if found else None


def _python() -> tuple[bytes, float | None]:
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    return _ask_python(generator) if _python_offset is None else _read_python(generator, _python_offset)


# --- NumPy --------------------------------------------------------------------------------------------


def _ask_numpy(generator: np.random.RandomState) -> tuple[bytes, float | None]:
    kind, keys, index, has_gauss, gauss = generator.get_state(legacy=True)
    if kind != "MT19937":
        raise RuntimeError(f"NumPy's global generator is {kind}; its state can be kept only for MT19937, the default")
    return keys.tobytes() + struct.pack("@i", index), float(gauss) if has_gauss else None  # type: ignore[union-attr]


def _read_numpy(generator: Any, offset: int) -> tuple[bytes, float | None]:
    words = ctypes.string_at(generator._bit_generator.ctypes.state_address, _STATE)
    has_gauss, gauss = _GAUSS.unpack(ctypes.string_at(id(generator) + offset, _GAUSS.size))
    return words, gauss if has_gauss else None


def _find_numpy() -> int | None:
    """Where in a `RandomState` its second normal number stands."""
    generator = np.random.RandomState(1)
    kind, keys, index, _, _ = generator.get_state(legacy=True)
    offset = -1
    for gauss in (0.12345, 0.54321):
        generator.set_state((kind, keys, index, 1, gauss))  # type: ignore[arg-type]
        offset = _memory(generator).find(_GAUSS.pack(1, gauss))
        if offset < 0 or _read_numpy(generator, offset) != _ask_numpy(generator):
            return None
    generator.seed(2)
    return offset if _read_numpy(generator, offset) == _ask_numpy(generator) else None


def _numpy() -> tuple[bytes, float | None]:
    generator: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
    if _numpy_offset is None or type(generator._bit_generator) is not np.random.MT19937:
        return _ask_numpy(generator)
    return _read_numpy(generator, _numpy_offset)


def _memory(value: object) -> bytes:
    return ctypes.string_at(id(value), type(value).__basicsize__)


try:
    _python_offset, _numpy_offset = _find_python(), _find_numpy()
except (AttributeError, TypeError):  # of another Python or NumPy: `_bit_generator` or `ctypes` may be missing
    _python_offset = _numpy_offset = None

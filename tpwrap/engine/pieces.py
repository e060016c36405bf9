"""The bytes of named tensors in pieces: what moves, and is compared, one at a time.

A piece is a range of a tensor's bytes in row-major order. Where the tensor's memory is just these bytes (on the CPU,
contiguous), a piece is that memory itself. Everything else is copied piece by piece, so that nobody ever holds a large
tensor twice.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tpwrap.engine import _native

PIECE = 4 << 20
"""bytes of the largest piece"""
TOGETHER = 4
"""pieces of that size that are handled together: what a request costs is spread over them"""
MOST = 1024
"""pieces that are handled together at most: Linux sends and receives that many parts in one call"""
_HEAD = 16
_ALIGNED = 16
"""bytes; the largest element"""

_view_of_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200
"""PyBUF_WRITE"""


class Piece(NamedTuple):
    name: str
    """of its tensor"""
    offset: int
    nbytes: int


class Bytes(NamedTuple):
    """The same memory twice: for torch, and for sockets."""

    tensor: torch.Tensor
    view: memoryview


class Scratch:
    """Memory for the pieces of a batch that have none of their own, the same for one batch after the other."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def clear(self) -> None:
        """What was taken is not needed any more."""
        self._used = 0

    def take(self, nbytes: int) -> Bytes:
        if self._used + nbytes > len(self._memory):
            self._memory = torch.empty(max(nbytes, PIECE + _ALIGNED * MOST), dtype=torch.uint8, device="cpu")
            self._used = 0
        taken = self._memory[self._used : self._used + nbytes]
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        return Bytes(taken, _view(taken))


class Pieces:
    """All pieces of `tensors`, numbered in the order of the tensors' names. size: bytes of the largest; None: PIECE."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], size: int | None = None) -> None:
        self.size = size or PIECE
        self.all: list[Piece] = []
        self._tensors = dict(tensors)
        self._own: list[torch.Tensor | None] = []
        """by piece: the part of the tensor, where its memory can be used"""
        for name in sorted(tensors):
            tensor = tensors[name]
            nbytes = tensor.nbytes
            step = max(self.size - self.size % tensor.itemsize, tensor.itemsize)
            offsets = range(0, nbytes, step)
            self.all += [Piece(name, offset, min(step, nbytes - offset)) for offset in offsets]
            if _is_plain(tensor):
                parts = [tensor] if len(offsets) == 1 else tensor.view(-1).split(step // tensor.itemsize)
                self._own += parts[: len(offsets)]
            else:
                self._own += [None] * len(offsets)

    def room(self, n: int, scratch: Scratch) -> Bytes:
        """Memory on the CPU for piece `n`: the tensor's own where possible."""
        own = self._own[n]
        return scratch.take(self.all[n].nbytes) if own is None else Bytes(own, _view(own))

    def load(self, n: int, room: Bytes) -> Bytes:
        """Put piece `n` into its `room` (own memory holds it already), and return that."""
        for part, place in self._apart(n, room):
            place.copy_(part)
        return room

    def store(self, n: int, room: Bytes) -> None:
        """Put into the tensor what its `room` was filled with."""
        for part, place in self._apart(n, room):
            part.copy_(place)

    def read(self, numbers: Sequence[int], scratch: Scratch) -> list[Bytes]:
        """The bytes of a batch on the CPU: not to be written to, and good until `scratch` is used again."""
        scratch.clear()
        return [self.load(n, self.room(n, scratch)) for n in numbers]

    def head(self, n: int) -> bytes:
        """The first bytes of piece `n`: pieces with different heads are different."""
        own = self._own[n]
        if own is not None:
            return ctypes.string_at(own.data_ptr(), min(_HEAD, self.all[n].nbytes))
        name, offset, _ = self.all[n]
        tensor = self._tensors[name]
        first = offset // tensor.itemsize
        (element,) = _parts(tensor, first, first + 1)
        copied = torch.empty(1, dtype=tensor.dtype, device="cpu").copy_(element.view(1))
        return _view(copied).tobytes()

    def batches(self, numbers: Sequence[int] | None = None, shares: int = 1) -> Iterator[list[int]]:
        """`numbers` (all of them), in rows of up to TOGETHER large pieces; of fewer where that would not make several
        for each of so many `shares`, or where they have to be held in memory of ours."""
        numbers = range(len(self.all)) if numbers is None else numbers
        total = sum(self.all[n].nbytes for n in numbers)
        most = min(max(total // (2 * shares), self.size), TOGETHER * self.size)
        batch: list[int] = []
        filled = 0
        for n in numbers:
            nbytes = self.all[n].nbytes * (TOGETHER if self._own[n] is None else 1)
            if batch and (filled + nbytes > most or len(batch) == MOST):
                yield batch
                batch, filled = [], 0
            batch.append(n)
            filled += nbytes
        if batch:
            yield batch

    def by_tensor(self, digests: Mapping[int, str]) -> dict[str, str]:
        """One digest for each tensor, from those of all pieces."""
        found = dict.fromkeys(self._tensors, "")
        several: dict[str, list[str]] = {}
        for n, (name, offset, _) in enumerate(self.all):
            if offset:
                several.setdefault(name, [found[name]]).append(digests[n])
            else:
                found[name] = digests[n]
        return found | {name: _joined(of) for name, of in several.items()}

    def _apart(self, n: int, room: Bytes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where piece `n` is no memory of its own: (part of the tensor, its place in `room`), all of them."""
        if self._own[n] is not None:
            return
        name, offset, nbytes = self.all[n]
        tensor = self._tensors[name]
        elements = room.tensor.view(tensor.dtype)
        at = 0
        with torch.no_grad():
            for part in _parts(tensor, offset // tensor.itemsize, (offset + nbytes) // tensor.itemsize):
                yield part, elements[at : at + part.numel()].view(part.shape)
                at += part.numel()


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """One digest for each tensor: equal where dtype, shape and bits are equal, whatever the layout and the device."""
    pieces = Pieces(tensors)
    found: dict[int, str] = {}
    scratch = Scratch()
    for batch in pieces.batches():
        found.update(zip(batch, digests_of(pieces.read(batch, scratch)), strict=True))
    return pieces.by_tensor(found)


def digests_of(data: Sequence[Bytes]) -> list[str]:
    return _native.digests([bytes_.tensor for bytes_ in data])


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its elements one after the other."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _view(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor whose elements lie one after the other; good as long as the tensor is."""
    # Not tensor.numpy(): that knows fewer types, and takes ten times as long, which counts with many small tensors.
    view: memoryview = _view_of_memory(tensor.data_ptr(), tensor.nbytes, _WRITABLE)
    return view


def _parts(tensor: torch.Tensor, first: int, last: int) -> list[torch.Tensor]:
    """Views of `tensor` that hold, one after the other, its elements `first` to `last` in row-major order."""
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    if tensor.dim() < 2:
        return [tensor.view(-1)[first:last]]
    row = tensor[0].numel()
    start, stop = -(-first // row), last // row
    if start > stop:  # within one row
        return _parts(tensor[stop], first - stop * row, last - stop * row)
    before = _parts(tensor[start - 1], first - (start - 1) * row, row) if first < start * row else []
    after = _parts(tensor[stop], 0, last - stop * row) if stop * row < last else []
    return [*before, *([tensor[start:stop]] if start < stop else []), *after]


def _joined(digests: list[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()

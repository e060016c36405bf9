"""Tensors in pieces: every kind of tensor, whatever its layout, gives the same bytes, and takes them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpwrap.engine import pieces
from tpwrap.engine.pieces import Pieces, Scratch

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
]


def filled(shape: list[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit pattern that the dtype allows: NaNs, infinities and denormal numbers too."""
    nbytes = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=seeded(seed))
    return data.view(dtype).view(shape)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def laid_out(tensor: torch.Tensor, order: list[int], gap: int) -> torch.Tensor:
    """Equal to `tensor`, with its dimensions in another order in memory, and holes of `gap` elements in it."""
    shape = [tensor.shape[i] for i in order]
    strides, step = [0] * tensor.dim(), 1 + gap
    for i in reversed(range(tensor.dim())):
        strides[order[i]] = step
        step *= shape[i]
    made = torch.zeros(step + 1, dtype=torch.uint8).repeat_interleave(tensor.itemsize).view(tensor.dtype)
    return made.as_strided(list(tensor.shape), strides, 1).copy_(tensor)


def in_order(tensor: torch.Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


def whole(some: Pieces) -> bytes:
    scratch = Scratch()
    read = (data for batch in some.batches() for data in some.read(batch, scratch))
    return b"".join(data.view.tobytes() for data in read)


shapes = st.lists(st.integers(0, 5), max_size=4)


@settings(deadline=None)
@given(shapes, st.sampled_from(DTYPES), st.randoms(use_true_random=False), st.integers(0, 2), st.integers(1, 100))
def test_any_layout_gives_its_elements_in_order_and_takes_them(
    shape: list[int], dtype: torch.dtype, random, gap: int, size: int
) -> None:
    tensor = filled(shape, dtype)
    odd = laid_out(tensor, random.sample(range(len(shape)), len(shape)), gap)
    plain, cut = Pieces({"t": tensor}, size), Pieces({"t": odd}, size)
    assert cut.all == plain.all
    assert whole(cut) == whole(plain) == in_order(tensor)
    assert all(0 < piece.nbytes <= max(size, dtype.itemsize) for piece in cut.all)
    for n in range(len(cut.all)):
        head = cut.head(n)
        assert head == plain.head(n)[: len(head)]
    assert pieces.digests({"t": odd}) == pieces.digests({"t": tensor})
    target = laid_out(filled(shape, dtype, 1), random.sample(range(len(shape)), len(shape)), gap)
    into = Pieces({"t": target}, size)
    for n in range(len(into.all)):
        room = into.room(n, Scratch())
        room.view[:] = plain.read([n], Scratch())[0].view
        into.store(n, room)
    assert in_order(target) == in_order(tensor)


def test_conjugated_and_negated_views_are_what_they_look_like() -> None:
    value = torch.complex(torch.arange(6.0).view(2, 3), torch.ones(2, 3))
    for view in (value.conj(), value.conj().imag, value.conj().t()):
        assert view.is_conj() or view.is_neg()
        assert whole(Pieces({"t": view}, 16)) == whole(Pieces({"t": view.resolve_conj().resolve_neg().contiguous()}))
    target = torch.zeros(3, 2, dtype=torch.complex64).conj()
    into = Pieces({"t": target})
    into.store(0, Pieces({"t": value.t().contiguous()}).read([0], Scratch())[0])
    assert torch.equal(target, value.t())


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), max_size=12), st.integers(1, 64), st.integers(1, 5))
def test_batches_hold_every_piece_once_and_are_a_few_pieces_large(sizes: list[int], size: int, shares: int) -> None:
    some = Pieces({f"t{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(sizes)}, size)
    batches = list(some.batches(shares=shares))
    assert [n for batch in batches for n in batch] == list(range(len(some.all)))
    assert sum(piece.nbytes for piece in some.all) == sum(sizes)
    assert all(sum(some.all[n].nbytes for n in batch) <= pieces.TOGETHER * size for batch in batches)
    assert len(batches) >= min(2 * shares, sum(sizes) // size)


def test_numbers_do_not_depend_on_the_order_of_the_tensors() -> None:
    one, two = torch.zeros(3), torch.ones(5)
    assert Pieces({"a": one, "b": two}, 8).all == Pieces({"b": two, "a": one}, 8).all


@pytest.mark.parametrize("at", [0, 500, 999])
def test_a_tensors_digest_is_of_all_its_pieces(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 256)
    tensor = torch.arange(1000.0)
    before = pieces.digests({"t": tensor, "u": tensor[:0]})
    tensor[at] += 1
    after = pieces.digests({"t": tensor, "u": tensor[:0]})
    assert before["t"] != after["t"]
    assert before["u"] == after["u"]

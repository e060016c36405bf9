"""The digest is one function of the bytes, however the processor at hand computes it."""

from __future__ import annotations

import struct

import pytest
import torch

from tpwrap.engine import _native

A, B, WORD, LANES = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, (1 << 64) - 1, 16


def mix(x: int) -> int:
    x ^= x >> 31
    x = x * B & WORD
    return x ^ (x >> 29)


def by_hand(data: bytes) -> str:
    lanes = [mix(A * (i + 1) & WORD ^ len(data)) for i in range(LANES)]
    whole = len(data) // (8 * LANES) * (8 * LANES)
    for block in struct.iter_unpack(f"<{LANES}Q", data[:whole]):
        for i, word in enumerate(block):
            x = (lanes[i] ^ word) * A & WORD
            lanes[i] = x ^ (x >> 32)
    tail = struct.unpack(f"<{LANES}Q", data[whole:].ljust(8 * LANES, b"\0"))
    found = B
    for i in range(LANES):
        found = (mix(found ^ mix(lanes[i] ^ tail[i])) + i * A) & WORD
    return f"{mix(found):016x}"


@pytest.mark.parametrize("size", [0, 1, 8, 127, 128, 129, 255, 1000, 4096])
def test_a_digest_is_what_its_definition_gives(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert _native.digests([data]) == [by_hand(data.numpy().tobytes())]


def test_every_bit_counts() -> None:
    data = torch.zeros(600, dtype=torch.uint8)
    found = {_native.digests([data])[0]}
    for byte in range(len(data)):
        data[byte] = 1 << byte % 8
        found.add(_native.digests([data])[0])
        data[byte] = 0
    assert len(found) == 601

"""What only one rank knows at a publication, in the form in which buddies keep it: the sidecar of a script as it is.

Compare `tpwrap.engine.sidecar.Sidecar`, which serves the two-line API.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tpwrap.engine import encoding, randomness
from tpwrap.engine.script.passes import Moment, PassState
from tpwrap.engine.script.tape import End

_Pool = dict[bytes, int]


class Memory(NamedTuple):
    """Published at the start of a backward pass: it serves an entry after update `step`, and after further updates that
    follow without another backward pass."""

    step: int
    backwards: int
    """backward passes begun, this one included: where in a newcomer's way it applies"""
    random: randomness.State
    tape: End
    losses: list[torch.Tensor]
    """what backward was started from, since the last update"""
    buffers: list[dict[str, torch.Tensor]]
    """of each model, in the order of their first call"""
    loose: dict[str, torch.Tensor]
    """tensors in the script's variables, by path"""
    aliases: dict[str, str]
    """further paths of those"""
    scalars: dict[str, Any]
    """numbers and texts in the script's variables, by path"""
    slow: list[str]
    """paths of large tensors that come from replicas"""
    large: dict[str, int]
    """paths of tensors that are too large to be sent, and are lost: bytes"""
    passes: dict[int, PassState]
    own: list[dict[str, Any]]
    """generators that loaders own"""

    def encode(self) -> bytes:
        """Several random states are mostly equal in their parts: each part is sent once. Raises TypeError."""
        pool: _Pool = {}
        passes = {n: (_moment(p.made, pool), p.first and _moment(p.first, pool)) for n, p in self.passes.items()}
        packed = (*self[:2], _pooled(self.random, pool), tuple(self.tape), *self[4:11], passes, self.own)
        return encoding.encode((packed, list(pool)))

    @staticmethod
    def decode(blob: bytes) -> Memory:
        packed, pool = encoding.decode(blob)
        step, backwards, state, end, *middle, passes, own = packed
        taken_up = {n: PassState(_unmoment(m, pool), f and _unmoment(f, pool)) for n, (m, f) in passes.items()}
        return Memory._make((step, backwards, _unpooled(state, pool), End(*end), *middle, taken_up, own))


def _moment(moment: Moment, pool: _Pool) -> Any:
    return (_pooled(moment.state, pool), moment.own)


def _unmoment(packed: Any, pool: list[bytes]) -> Moment:
    return Moment(_unpooled(packed[0], pool), packed[1])


def _pooled(state: randomness.State, pool: _Pool) -> list[Any]:
    return [pool.setdefault(part, len(pool)) if isinstance(part, bytes) else (part,) for part in state]


def _unpooled(parts: list[Any], pool: list[bytes]) -> randomness.State:
    return randomness.State._make(pool[part] if isinstance(part, int) else part[0] for part in parts)

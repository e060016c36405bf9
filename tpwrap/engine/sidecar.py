"""A rank's own small state, which no replica has, made durable at its buddies (the durability rule).

The sidecar of step k holds what a newcomer needs, beside a replica's tensors, to go on right after update k: random
generators, the place in the data, rank-local buffers (BatchNorm statistics), registered state, and the losses of the
step's batches. It is published at the start of the step's last backward, that is *before* the rank's last
contribution to update k: otherwise survivors could apply k while the only copy of the dead rank's state is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from tpwrap.control import sidecars
from tpwrap.engine import _native, encoding
from tpwrap.engine.communicators import Aborted
from tpwrap.engine.data import Origin
from tpwrap.engine.randomness import State

_STOP_PERIOD = 0.05
"""seconds between looks at whether to go on waiting"""


class SidecarLost(RuntimeError):
    """No buddy that is left holds what a newcomer needs."""


class Publisher:
    """Sends this rank's blobs to its buddies and keeps the newest, so that new buddies can be given them."""

    def __init__(self, journal: _native.Journal, key: bytes, rank: int, timeout: float) -> None:
        self._native = _native.Buddies(journal)
        self._key = key
        self._rank = rank
        self._timeout = timeout
        self._lock = threading.Lock()
        self._addresses: list[str] = []
        self._connections: dict[str, socket.socket] = {}
        self._kept: dict[int, bytes] = {}
        self._sequence = 0
        self.generation = 0

    def publish(self, step: int, blob: bytes) -> None:
        """Send; collectives are held (in C++) until every live buddy has it. Does not wait."""
        with self._lock:
            self._kept[step] = blob
            for old in sorted(s for s in self._kept if s != sidecars.SETUP_STEP)[:-2]:
                del self._kept[old]
            self._send(step, blob)

    def connect(self, generation: int, addresses: list[str], stop: Callable[[], bool] = lambda: False) -> None:
        """Use the buddies at `addresses` from now on, and give them what we keep. A buddy that cannot be reached is
        left out: its node is about to be found dead, and the next generation names another.

        Raises Aborted when `stop` turns true meanwhile: a buddy that was lost together with the node that this recovery
        is about must not keep us from letting go for the next one.
        """
        with self._lock:
            self.generation = generation
            if addresses == self._addresses:
                return
            self._native.clear()
            for old in self._connections.values():
                old.close()
            self._connections = {}
            self._addresses = addresses
            for address in addresses:
                with contextlib.suppress(OSError):
                    connection = sidecars.connect(address, self._key, b"P", self._timeout, stop)
                    self._native.add(os.dup(connection.fileno()))
                    self._connections[address] = connection
                if stop():
                    self._addresses = []  # the next plan may name the same ones, and they lack something
                    raise Aborted("the generation was given up while buddies were looked for")
            for step, blob in sorted(self._kept.items()):
                self._send(step, blob)

    def drop(self, address: str) -> None:
        """The buddy at `address` is lost: nobody waits for it any longer. Without the lock, which a thread that is
        stuck in sending to this very buddy may hold."""
        connection = self._connections.get(address)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def wait(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Until every live buddy has what was published last. Raises TimeoutError; Aborted when `stop` turns true."""
        deadline = time.monotonic() + seconds
        while not self._native.wait(_STOP_PERIOD):
            if stop():
                raise Aborted("the generation was given up before a buddy had acknowledged")
            if time.monotonic() > deadline:
                raise TimeoutError(f"a buddy did not acknowledge within {seconds:g} s")

    def adopt(self, step: int, blob: bytes) -> None:
        """A newcomer keeps what it was restored from: it may have to be restored again."""
        with self._lock:
            self._kept[step] = blob

    def _send(self, step: int, blob: bytes) -> None:
        self._sequence += 1
        put = sidecars.Put(self._sequence, self._rank, self.generation, step, blob)
        self._native.publish(self._sequence, put.frame())


def fetch(keepers: list[str], key: bytes, rank: int, step: int, timeout: float) -> bytes:
    """A rank's blob for `step` from the first keeper that has it. Raises SidecarLost."""
    problems = []
    for address in keepers:
        try:
            blob = sidecars.fetch(address, key, rank, step, timeout)
        except OSError as error:
            problems.append(f"{address}: {error}")
            continue
        if blob is not None:
            return blob
        problems.append(f"{address}: has none")
    what = "set-up record" if step == sidecars.SETUP_STEP else f"state of step {step}"
    raise SidecarLost(f"the {what} of rank {rank} is lost ({'; '.join(problems) or 'no buddy is left'})")


class Sidecar(NamedTuple):
    """What a newcomer needs, beside a replica's tensors, to go on right after update `step`."""

    step: int
    origin: Origin | None
    """None before the first batch"""
    random: State
    """of the generators when backward began: nothing may be drawn between that and the end of the update"""
    losses: list[torch.Tensor]
    """what backward was started from, in this step"""
    buffers: dict[str, torch.Tensor]
    registered: dict[str, Any]

    def encode(self) -> bytes:
        """It holds several random states, most of whose parts are equal: each is sent once."""
        pool: dict[bytes, int] = {}
        origin = self.origin
        packed = (
            self.step,
            None if origin is None else (origin.epoch, origin.passes, origin.batch),
            None if origin is None else (_pooled(origin.at_pass, pool), _pooled(origin.at_batch, pool)),
            _pooled(self.random, pool),
            list(pool),
            encoding.encode([self.losses, self.buffers, self.registered]),
        )
        return msgspec.msgpack.encode(packed)

    @staticmethod
    def decode(blob: bytes) -> Sidecar:
        step, place, at, now, pool, rest = msgspec.msgpack.decode(blob)
        origin = None if place is None else Origin(*place, *(_unpooled(state, pool) for state in at))
        return Sidecar(step, origin, _unpooled(now, pool), *encoding.decode(rest))


def _pooled(state: State, pool: dict[bytes, int]) -> list[Any]:
    return [pool.setdefault(part, len(pool)) if isinstance(part, bytes) else (part,) for part in state]


def _unpooled(parts: list[Any], pool: list[bytes]) -> State:
    return State._make(pool[part] if isinstance(part, int) else part[0] for part in parts)

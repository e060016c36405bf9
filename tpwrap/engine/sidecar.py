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
from itertools import chain
from typing import Any, NamedTuple, cast

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
    """Sends this rank's blobs to its buddies and keeps the newest (and all segments), so that new buddies can be given
    them.

    A buddy is given everything in the order of publication, segments first when it is new. So a keeper that has a
    sidecar has every segment that was published before it.
    """

    def __init__(self, journal: _native.Journal, key: bytes, rank: int, timeout: float) -> None:
        self._native = _native.Buddies(journal)
        self._key = key
        self._rank = rank
        self._timeout = timeout
        self._lock = threading.Lock()
        self._addresses: list[str] = []
        self._connections: dict[str, socket.socket] = {}
        self._setup: bytes | None = None
        self._segments: list[bytes] = []
        self._kept: dict[int, bytes] = {}
        """the newest two sidecars by step"""
        self._sequence = 0
        self.generation = 0

    def publish(self, step: int, blob: bytes) -> None:
        """Send; collectives are held (in C++) until every live buddy has it. Does not wait."""
        with self._lock:
            self._keep(step, blob)
            self._send(step, blob)

    def publish_segment(self, i: int, blob: bytes) -> None:
        """Send segment `i`, which is kept for ever, as `publish` does. Raises ValueError when `i` is not the next."""
        with self._lock:
            if i != len(self._segments):
                raise ValueError(f"segment {i} was published, but {len(self._segments)} is the next")
            self._segments.append(blob)
            self._send(sidecars.segment_step(i), blob)

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
                    self._bring_up_to_date(connection, stop)
                if stop():
                    self._addresses = []  # the next plan may name the same ones, and they lack something
                    raise Aborted("the generation was given up while buddies were looked for")
            self._sequence += len(self._segments) + len(self._recent())
            self._native.publish(self._sequence, b"")  # nothing more to send: its acknowledgement is waited for

    def _bring_up_to_date(self, connection: socket.socket, stop: Callable[[], bool]) -> None:
        """Send all that we keep. Not in C++, which could not be stopped: this may be more than the buffers of a cut
        link take. Raises OSError; the buddy then counts as lost."""
        kept = chain(((sidecars.segment_step(i), blob) for i, blob in enumerate(self._segments)), self._recent())
        frames = (
            sidecars.Put(seq, self._rank, self.generation, step, blob).frame()
            for seq, (step, blob) in enumerate(kept, self._sequence + 1)
        )
        try:
            for batch in sidecars.batches(frames):
                sidecars.send(connection, batch, self._timeout, stop)
        except OSError:
            connection.shutdown(socket.SHUT_RDWR)
            raise

    def _recent(self) -> list[tuple[int, bytes]]:
        setup = [] if self._setup is None else [(sidecars.SETUP_STEP, self._setup)]
        return setup + sorted(self._kept.items())

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
            self._keep(step, blob)

    def adopt_segments(self, segments: list[bytes]) -> None:
        """A newcomer keeps the tape of the rank that it becomes; new buddies get it in `connect`."""
        with self._lock:
            self._segments = list(segments)

    def _keep(self, step: int, blob: bytes) -> None:
        if step == sidecars.SETUP_STEP:
            self._setup = blob
            return
        self._kept[step] = blob
        for old in sorted(self._kept)[:-2]:
            del self._kept[old]

    def _send(self, step: int, blob: bytes) -> None:
        self._sequence += 1
        put = sidecars.Put(self._sequence, self._rank, self.generation, step, blob)
        self._native.publish(self._sequence, put.frame())


def fetch(
    keepers: list[str], key: bytes, rank: int, step: int, timeout: float, stop: Callable[[], bool] = lambda: False
) -> bytes:
    """A rank's blob for `step` from the first keeper that has it. Raises SidecarLost; Aborted when `stop` turns
    true."""
    problems = []
    for address in keepers:
        try:
            blob = sidecars.fetch(address, key, rank, step, timeout, stop)
        except OSError as error:
            _look_up(stop)
            problems.append(f"{address}: {error}")
            continue
        if blob is not None:
            return blob
        problems.append(f"{address}: has none")
    what = "set-up record" if step == sidecars.SETUP_STEP else f"state of step {step}"
    raise _lost(what, rank, problems)


def fetch_covering(
    keepers: list[str], key: bytes, rank: int, step: int, timeout: float, stop: Callable[[], bool] = lambda: False
) -> bytes:
    """A rank's sidecar for `step` or, where none was published for it, for the greatest step before it.

    A keeper that was cut off has old ones only, so all are asked unless one has that very step. Where keepers are gone
    it may still be too old: the caller knows from its contents whether it covers `step`. Raises SidecarLost; Aborted
    when `stop` turns true.
    """
    problems = []
    newest: tuple[int, bytes] | None = None
    for address in keepers:
        try:
            found = sidecars.fetch_covering(address, key, rank, step, timeout, stop)
        except OSError as error:
            _look_up(stop)
            problems.append(f"{address}: {error}")
            continue
        if found is None:
            problems.append(f"{address}: has none")
        elif newest is None or found[0] > newest[0]:
            newest = found
            if newest[0] == step:
                break
    if newest is None:
        raise _lost(f"state of step {step}", rank, problems)
    return newest[1]


def fetch_segments(
    keepers: list[str],
    key: bytes,
    rank: int,
    count: int,
    timeout: float,
    stop: Callable[[], bool] = lambda: False,
    beside: int | None = None,
) -> list[bytes]:
    """Segments 0 to `count` - 1 of a rank's tape, from the first keeper that has them; what it lacks, from the next.

    beside: the step of the sidecar that they belong to; only keepers that have it, and with it every segment that was
    published before it, are asked. (One that was cut off before the rank moved may have segments of the tape as the
    lost worker went on with it.) Raises SidecarLost; Aborted when `stop` turns true.
    """
    found: list[bytes | None] = [None] * count
    problems = []
    for address in keepers:
        first = _first_missing(found)
        if first == count:
            break
        try:
            asked = sidecars.fetch_segments(address, key, rank, first, count - first, timeout, stop, beside)
            for i, blob in enumerate(asked, first):
                if found[i] is None:
                    found[i] = blob
        except OSError as error:
            _look_up(stop)
            problems.append(f"{address}: {error}")
            continue
        if None in found:
            problems.append(f"{address}: has no segment {_first_missing(found)}")
    if None in found:
        raise _lost(f"segment {_first_missing(found)} of {count} of the tape", rank, problems)
    return cast(list[bytes], found)


def _first_missing(found: list[bytes | None]) -> int:
    return found.index(None) if None in found else len(found)


def _look_up(stop: Callable[[], bool]) -> None:
    if stop():
        raise Aborted("the generation was given up while a keeper was asked")


def _lost(what: str, rank: int, problems: list[str]) -> SidecarLost:
    return SidecarLost(f"the {what} of rank {rank} is lost ({'; '.join(problems) or 'no buddy is left'})")


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
    scalers: list[dict[str, Any]]

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
            encoding.encode([self.losses, self.buffers, self.registered, self.scalers]),
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

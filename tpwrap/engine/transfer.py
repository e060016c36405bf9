"""Move replicated state from survivors to a newcomer, striped over all of them, over plain sockets.

The server runs in every worker and answers only while its rank is held at the commit gate for the generation and step
that the request names. The newcomer first asks one source for the listing (names, shapes, scalars, the first bytes of
every piece). Then it works through the pieces with all sources at once: whoever is free serves the next ones, so a fast
source serves more, and what a lost or slow one has not delivered goes to the others. A piece that may be equal already
is asked for with the newcomer's own digest of it, and comes only if the source has another one. Digests are taken
piece by piece while they move, of memory that is still in the cache; what has come is compared with its source's.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tpwrap.control.sidecars import dial, receive, receive_exactly, send
from tpwrap.engine.pieces import MOST, Bytes, Pieces, Scratch, digests_of
from tpwrap.engine.state import Entry, ReplicaState, StateError

T = TypeVar("T")

_HANDSHAKE_SECONDS = 10.0
_PATIENCE = 60.0
"""seconds that a request waits for its offer; the newcomer itself gives up earlier"""
_LOOK_PERIOD = 0.05
"""seconds between looks at whether to go on waiting"""
_STREAMS = 2
"""connections to a source: while what came over one is digested, the other one moves"""
_MOST_STREAMS = 16
"""connections to all sources; further sources are in reserve"""
_AHEAD = 2
"""batches that a source is asked for at a time: while one is on its way, the next is being read"""


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """What a replica holds."""

    manifest: list[Entry]
    digests: dict[str, str]
    scalars: bytes


class Listing(msgspec.Struct, frozen=True, array_like=True):
    """What a source offers. heads: the first bytes of each piece; size: of the largest piece."""

    manifest: list[Entry]
    scalars: bytes
    size: int
    heads: list[bytes]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """want: pieces, each with the digest of what the newcomer holds in its place ("": it differs); the answer is the
    digests of them all, and then the bytes of those where it is another one. None asks for the listing, an empty list
    for the readings."""

    generation: int
    step: int
    want: list[tuple[int, str]] | None


class Offer:
    """What this worker may serve now. at_serving: called whenever pieces are asked for, when half of the answer is out
    (faults are injected there)."""

    def __init__(
        self,
        generation: int,
        step: int,
        state: ReplicaState,
        scalars: bytes,
        readings: bytes = b"",
        at_serving: Callable[[], None] | None = None,
    ) -> None:
        self.generation = generation
        self.step = step
        self.scalars = scalars
        self.readings = readings
        self.at_serving = at_serving
        self.manifest = state.manifest()
        self._pieces = Pieces(state.tensors())
        self._digesting = threading.Lock()
        self._digests: dict[int, str] = {}

    def listing(self) -> Listing:
        pieces = self._pieces
        return Listing(self.manifest, self.scalars, pieces.size, [pieces.head(n) for n in range(len(pieces.all))])

    def read(self, numbers: list[int], scratch: Scratch) -> tuple[list[Bytes], list[str]]:
        """The bytes of pieces and their digests, which are taken once for every newcomer that asks and for this rank's
        own report. Nothing writes to the state as long as the offer stands: the commit gate was closed, and any running
        update was over, before the plan came, and the gate opens only after all have reported. If something else did
        write (the script's own code after optimizer.step()), the newcomer would receive other bytes than these digests
        promise, and refuse them."""
        data = self._pieces.read(numbers, scratch)
        with self._digesting:
            new = {n: bytes_ for n, bytes_ in zip(numbers, data, strict=True) if n not in self._digests}
            if new:
                self._digests.update(zip(new, digests_of(list(new.values())), strict=True))
            return data, [self._digests[n] for n in numbers]

    def digests(self) -> dict[str, str]:
        """Digests of the state by tensor."""
        missing = [n for n in range(len(self._pieces.all)) if n not in self._digests]
        scratch = Scratch()
        for batch in self._pieces.batches(missing):
            self.read(batch, scratch)
        return self._pieces.by_tensor(self._digests)


_request = msgspec.msgpack.Decoder(Request)
_listing = msgspec.msgpack.Decoder(Listing)
_promises = msgspec.msgpack.Decoder(list[str])


def _token(key: bytes, challenge: bytes) -> bytes:
    return hmac.new(key, b"state" + challenge, hashlib.sha256).digest()


class StateServer:
    """Serves what this worker offers. host: address to listen on; key: the job's key.

    A request may come before the plan that it follows from has reached this worker, or while the plan's buddies are
    being connected: it waits for the offer. Requests of a generation that was given up, or is over, are refused, and
    what is being sent for them is cut off.
    """

    def __init__(self, host: str, key: bytes) -> None:
        self._key = key
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._changed = threading.Condition()
        self._offer: Offer | None = None
        self._oldest = 0
        self._serving: dict[socket.socket, int] = {}
        """by connection: the generation of its last request"""
        threading.Thread(target=self._accept, name="torchpass-state", daemon=True).start()

    def offer(self, offer: Offer) -> None:
        with self._changed:
            if offer.generation >= self._oldest:
                self._offer = offer
                self._changed.notify_all()

    def withdraw(self, before: int) -> None:
        """Generations smaller than `before` are served no more."""
        with self._changed:
            self._offer = None
            self._oldest = before
            self._changed.notify_all()
            for connection, generation in self._serving.items():
                if generation < before:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def _offered(self, connection: socket.socket, generation: int, step: int) -> Offer | None:
        def known() -> bool:
            return generation < self._oldest or (self._offer is not None and self._offer.generation >= generation)

        with self._changed:
            self._serving[connection] = generation
            self._changed.wait_for(known, _PATIENCE)
            offer = self._offer
        return offer if offer is not None and (offer.generation, offer.step) == (generation, step) else None

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connection,), name="torchpass-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, msgspec.MsgspecError):
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_HANDSHAKE_SECONDS)
                challenge = os.urandom(16)
                connection.sendall(challenge)
                if not hmac.compare_digest(receive_exactly(connection, 32), _token(self._key, challenge)):
                    return
                connection.settimeout(None)
                scratch = Scratch()
                while True:
                    (size,) = struct.unpack("<I", receive_exactly(connection, 4))
                    request = _request.decode(receive_exactly(connection, size))
                    offer = self._offered(connection, request.generation, request.step)
                    if offer is None:
                        return  # the newcomer sees a closed connection and waits for its next plan
                    if request.want is None:
                        _send_all(connection, [_framed(msgspec.msgpack.encode(offer.listing()))])
                    elif not request.want:
                        _send_all(connection, [_framed(offer.readings)])
                    else:
                        _serve_pieces(connection, offer, request.want, scratch)
            finally:
                with self._changed:
                    self._serving.pop(connection, None)


def _serve_pieces(connection: socket.socket, offer: Offer, want: list[tuple[int, str]], scratch: Scratch) -> None:
    data, digests = offer.read([n for n, _ in want], scratch)
    views = [memoryview(_framed(msgspec.msgpack.encode(digests)))]
    views += [d.view for d, (_, theirs), mine in zip(data, want, digests, strict=True) if theirs != mine]
    if offer.at_serving is not None:
        half = len(views[-1]) // 2
        _send_all(connection, [*views[:-1], views[-1][:half]])
        offer.at_serving()
        views = [views[-1][half:]]
    _send_all(connection, views)


def restore(
    state: ReplicaState,
    sources: list[str],
    key: bytes,
    generation: int,
    step: int,
    timeout: float,
    aborted: Callable[[], bool],
) -> tuple[Inventory, int]:
    """Make `state` equal to what the sources hold at `step`; returns an inventory of it, and the bytes moved. Without
    sources, `state` stays as it is. timeout: seconds in which some source must have delivered something.

    Pieces that were received stay received when this ends early: the next attempt does not move them again. Raises
    OSError (no source is left, or `aborted` turned true: wait for the next plan) or StateError (the script built
    another model here, or what came is not what its source holds).
    """
    if not sources:
        return Inventory(state.manifest(), state.digests(), state.scalars()), 0
    return _Restore(sources, key, generation, step, timeout, aborted).run(state)


def readings(
    source: str, key: bytes, generation: int, step: int, timeout: float, aborted: Callable[[], bool]
) -> bytes:
    """What the script of a source has read between its last backward pass before update `step` and that update. Raises
    OSError."""
    with _connect(source, key, timeout, aborted) as connection:
        _ask(connection, Request(generation, step, []), timeout, aborted)
        (size,) = struct.unpack("<I", receive(connection, 4, timeout, aborted))
        return receive(connection, size, timeout, aborted)


class _Batch:
    """Pieces that are asked for together. patience: seconds after which somebody idle may have them instead."""

    def __init__(self, numbers: list[int], patience: float) -> None:
        self.numbers = numbers
        self.patience = patience


class _Work:
    """The batches that are not here yet. Whoever is free takes the next one."""

    def __init__(self, batches: list[_Batch]) -> None:
        self._left = deque(batches)
        self._missing = len(batches)
        self._changed = threading.Condition()
        self.idle = 0
        """threads that have nothing to do as long as no batch comes back"""

    @property
    def complete(self) -> bool:
        return not self._missing

    def take(self, wait: bool, check: Callable[[], None]) -> _Batch | None:
        """A batch; None when none is left. wait: until all are here, because one may come back; raises what `check`
        raises meanwhile."""
        with self._changed:
            if wait:
                self._await(check)
            return self._left.popleft() if self._left else None

    def _await(self, check: Callable[[], None]) -> None:
        self.idle += 1
        try:
            while self._missing and not self._left:
                check()
                self._changed.wait(_LOOK_PERIOD)
        finally:
            self.idle -= 1

    def finish(self) -> None:
        """A batch is here."""
        with self._changed:
            self._missing -= 1
            if not self._missing:
                self._changed.notify_all()

    def give_back(self, batch: _Batch) -> None:
        batch.patience *= 2  # else slow sources would take it from each other for ever
        with self._changed:
            self._left.appendleft(batch)
            self._changed.notify()


class _Restore:
    """One newcomer's way through the sources."""

    def __init__(
        self,
        sources: list[str],
        key: bytes,
        generation: int,
        step: int,
        timeout: float,
        aborted: Callable[[], bool],
    ) -> None:
        self._key = key
        self._generation = generation
        self._step = step
        self._timeout = timeout
        self._patience = timeout / 10
        self._aborted = aborted
        self._free = deque(sources * _STREAMS)
        """those that are not asked now and not known to be lost, as often as they may be asked at a time"""
        self._counting = threading.Lock()
        self._lost: OSError = ConnectionError("no source is left")
        self._failure: BaseException | None = None
        self._heard = time.monotonic()
        """when something came that counts, from any source"""
        self._work: _Work | None = None
        self._digests: dict[int, str] = {}
        self._moved = 0

    def run(self, state: ReplicaState) -> tuple[Inventory, int]:
        listing = self._with_a_source(self._list)
        state.allocate(listing.manifest)
        state.restore_scalars(listing.scalars)
        pieces = Pieces(state.tensors(), listing.size)
        alike = {n for n, head in enumerate(listing.heads) if pieces.head(n) == head}
        streams = min(len(self._free), _MOST_STREAMS)
        batches = [_Batch(numbers, self._patience) for numbers in pieces.batches(shares=streams)]
        self._work = work = _Work(batches)
        self._heard = time.monotonic()
        threads = [
            threading.Thread(target=self._pull, args=(work, pieces, alike), name="torchpass-pull", daemon=True)
            for _ in range(min(streams, len(batches)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not work.complete:
            self._check()
            raise self._lost
        return Inventory(listing.manifest, pieces.by_tensor(self._digests), listing.scalars), self._moved

    def _list(self, connection: socket.socket) -> Listing:
        patience = time.monotonic() + self._patience
        self._ask(connection, None)
        return _listing.decode(self._frame(connection, patience))

    def _pull(self, work: _Work, pieces: Pieces, alike: set[int]) -> None:
        try:
            self._with_a_source(lambda connection: self._pull_from(connection, work, pieces, alike))
        except OSError:
            pass  # `run` finds out whether the others could do without
        except BaseException as error:
            self._failure = error

    def _pull_from(self, connection: socket.socket, work: _Work, pieces: Pieces, alike: set[int]) -> None:
        """Take batches until none is left. What was asked for and has not come is given back."""
        asked: deque[tuple[_Batch, dict[int, str]]] = deque()
        scratch = Scratch()
        try:
            while True:
                while len(asked) < _AHEAD and (batch := work.take(not asked, self._check)):
                    held = dict.fromkeys(batch.numbers, "")
                    asked.append((batch, held))
                    equal = [n for n in batch.numbers if n in alike]
                    if equal:
                        held.update(zip(equal, digests_of(pieces.read(equal, scratch)), strict=True))
                    self._ask(connection, list(held.items()))
                if not asked:
                    return
                self._receive(connection, pieces, *asked[0], scratch)
                asked.popleft()
                work.finish()
        finally:
            for batch, _ in reversed(asked):
                work.give_back(batch)

    def _receive(
        self, connection: socket.socket, pieces: Pieces, batch: _Batch, held: dict[int, str], scratch: Scratch
    ) -> None:
        """The answer to a batch. held: the digests that were sent with the request."""
        patience = time.monotonic() + batch.patience
        promised = dict(zip(held, _promises.decode(self._frame(connection, patience)), strict=True))
        scratch.clear()
        rooms = {n: pieces.room(n, scratch) for n in held if promised[n] != held[n]}
        self._fill(connection, [room.view for room in rooms.values()], patience)
        for n, room in rooms.items():
            pieces.store(n, room)
        # Of what the tensors hold now, not of what has come.
        arrived = digests_of([pieces.load(n, room) for n, room in rooms.items()])
        for n, digest in zip(rooms, arrived, strict=True):
            if promised[n] != digest:
                raise StateError(f"{pieces.all[n].name} was received with another digest than it has at its source")
        with self._counting:
            self._digests.update(promised)
            self._moved += sum(pieces.all[n].nbytes for n in rooms)

    # --- sources --------------------------------------------------------------------------------------

    def _with_a_source(self, use: Callable[[socket.socket], T]) -> T:
        """`use` with a connection to a free source; with the next one when that is lost, or slow while there are
        others. Raises OSError when none is left."""
        while True:
            self._check()
            try:
                address = self._free.popleft()
            except IndexError:
                raise self._lost from None
            try:
                with self._connect(address) as connection:
                    result = use(connection)
            except TimeoutError as error:
                self._lost = error
                self._free.append(address)  # it may yet wake up
            except OSError as error:
                self._lost = error
            else:
                self._free.appendleft(address)
                return result

    def _connect(self, address: str) -> socket.socket:
        connection = _connect(address, self._key, self._patience if self._others() else self._timeout, self._over)
        # So that a read of many bytes is one call, and yet looks up now and then.
        seconds, rest = divmod(_LOOK_PERIOD, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        return connection

    def _others(self) -> bool:
        """Whether somebody else could go on with what one source is asked for."""
        return bool(self._free or (self._work is not None and self._work.idle))

    def _over(self) -> bool:
        complete = self._work is not None and self._work.complete
        return complete or self._failure is not None or self._aborted()

    def _check(self) -> None:
        """Raise what ends it all, if there is something."""
        if self._failure is not None:
            raise self._failure
        if self._over():
            raise ConnectionAbortedError("given up")
        if time.monotonic() - self._heard > self._timeout:
            raise TimeoutError("no source answers")

    # --- on a connection ------------------------------------------------------------------------------

    def _ask(self, connection: socket.socket, want: list[tuple[int, str]] | None) -> None:
        _ask(connection, Request(self._generation, self._step, want), self._timeout, self._over)

    def _frame(self, connection: socket.socket, patience: float) -> bytearray:
        size = bytearray(4)
        self._fill(connection, [memoryview(size)], patience)
        frame = bytearray(*struct.unpack("<I", size))
        self._fill(connection, [memoryview(frame)], patience)
        return frame

    def _fill(self, connection: socket.socket, views: list[memoryview], patience: float) -> None:
        """Receive all of `views`. patience: when to leave it to others, if there are."""
        while views:
            try:
                got = connection.recvmsg_into(views[:MOST], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                got = -1
            if got == 0:
                raise ConnectionError("the source closed the connection")
            if got > 0:
                self._heard = time.monotonic()
                views = _after(views, got)
            self._check()
            if views and time.monotonic() > patience and self._others():
                raise TimeoutError("the source is slow")


def _connect(address: str, key: bytes, timeout: float, aborted: Callable[[], bool]) -> socket.socket:
    connection = dial(address, timeout, aborted)
    try:
        send(connection, _token(key, receive(connection, 16, timeout, aborted)), timeout, aborted)
    except OSError:
        connection.close()
        raise
    return connection


def _ask(connection: socket.socket, request: Request, timeout: float, aborted: Callable[[], bool]) -> None:
    send(connection, _framed(msgspec.msgpack.encode(request)), timeout, aborted)


def _framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def _send_all(connection: socket.socket, views: list[memoryview] | list[bytes]) -> None:
    left = [memoryview(view) for view in views]
    while left:
        left = _after(left, connection.sendmsg(left[:MOST]))


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What of `views` is left when the first `count` bytes are dealt with."""
    for i, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[i + 1 :]]
        count -= len(view)
    return []

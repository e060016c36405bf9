"""Move replicated state from survivors to a newcomer, striped over all of them, over plain sockets.

The server runs in every worker and answers only while its rank is held at the commit gate for the generation and step
that the request names. The newcomer first asks one source for the inventory (names, shapes, digests, scalars), keeps
what is equal already, and fetches the rest in pieces from all sources at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Callable

import msgspec
import torch

from tpwrap.control.sidecars import dial, receive, receive_exactly, receive_into, send
from tpwrap.engine.state import Entry, ReplicaState, StateError

PIECE = 4 << 20
"""bytes; what one source serves in one go"""
_HANDSHAKE_SECONDS = 10.0
_PATIENCE = 60.0
"""seconds that a request waits for its offer; the newcomer itself gives up earlier"""


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """What a source holds at the step asked for."""

    manifest: list[Entry]
    digests: dict[str, str]
    scalars: bytes


class Request(msgspec.Struct, frozen=True, array_like=True):
    """want: (name, offset, length) in bytes; None asks for the inventory, an empty list for the readings."""

    generation: int
    step: int
    want: list[tuple[str, int, int]] | None


class Offer:
    """What this worker may serve now."""

    def __init__(
        self, generation: int, step: int, state: ReplicaState, scalars: bytes, readings: bytes = b""
    ) -> None:
        self.generation = generation
        self.step = step
        self.state = state
        self.scalars = scalars
        self.readings = readings
        self._digesting = threading.Lock()
        self._digests: dict[str, str] | None = None

    def digests(self) -> dict[str, str]:
        """Digests of `state`, taken once for every newcomer that asks and for this rank's own report. Nothing writes to
        the state as long as the offer stands: the commit gate was closed, and any running update was over, before the
        plan came, and the gate opens only after all have reported. If something else did write (the script's own code
        after optimizer.step()), the newcomer would receive other bytes than these digests promise, and refuse them."""
        with self._digesting:
            if self._digests is None:
                self._digests = self.state.digests()
            return self._digests


_request = msgspec.msgpack.Decoder(Request)
_inventory = msgspec.msgpack.Decoder(Inventory)


def _token(key: bytes, challenge: bytes) -> bytes:
    return hmac.new(key, b"state" + challenge, hashlib.sha256).digest()


class StateServer:
    """Serves what this worker offers. host: address to listen on; key: the job's key.

    A request may come before the plan that it follows from has reached this worker, or while the plan's buddies are
    being connected: it waits for the offer. Requests of a generation that was given up, or is over, are refused.
    """

    def __init__(self, host: str, key: bytes) -> None:
        self._key = key
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._changed = threading.Condition()
        self._offer: Offer | None = None
        self._oldest = 0
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

    def _offered(self, generation: int, step: int) -> Offer | None:
        def known() -> bool:
            return generation < self._oldest or (self._offer is not None and self._offer.generation >= generation)

        with self._changed:
            self._changed.wait_for(known, _PATIENCE)
            offer = self._offer
        return offer if offer is not None and (offer.generation, offer.step) == (generation, step) else None

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connection,), name="torchpass-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, msgspec.MsgspecError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_HANDSHAKE_SECONDS)
            challenge = os.urandom(16)
            connection.sendall(challenge)
            if not hmac.compare_digest(receive_exactly(connection, 32), _token(self._key, challenge)):
                return
            connection.settimeout(None)
            while True:
                (size,) = struct.unpack("<I", receive_exactly(connection, 4))
                request = _request.decode(receive_exactly(connection, size))
                offer = self._offered(request.generation, request.step)
                if offer is None:
                    return  # the newcomer sees a closed connection and waits for its next plan
                if request.want is None:
                    body = msgspec.msgpack.encode(Inventory(offer.state.manifest(), offer.digests(), offer.scalars))
                    connection.sendall(struct.pack("<I", len(body)) + body)
                elif not request.want:
                    connection.sendall(struct.pack("<I", len(offer.readings)) + offer.readings)
                else:
                    tensors = offer.state.tensors()
                    for name, offset, length in request.want:
                        connection.sendall(_bytes_of(tensors[name])[offset : offset + length])


def restore(
    state: ReplicaState,
    sources: list[str],
    key: bytes,
    generation: int,
    step: int,
    timeout: float,
    aborted: Callable[[], bool],
) -> tuple[Inventory, int]:
    """Make `state` equal to what the sources hold at `step`; returns their inventory, whose digests are then those of
    `state` itself, and the bytes moved. timeout: seconds that a source may be silent.

    Raises OSError (a source is gone, or `aborted` turned true: wait for the next plan) or StateError (the script built
    another model here).
    """
    first = _connect(sources[0], key, timeout, aborted)
    with first:
        _ask(first, Request(generation, step, None), timeout, aborted)
        (size,) = struct.unpack("<I", receive(first, 4, timeout, aborted))
        inventory = _inventory.decode(receive(first, size, timeout, aborted))
        state.allocate(inventory.manifest)
        state.restore_scalars(inventory.scalars)
        mine = state.digests()
        tensors = state.tensors()
        differing = [name for name, digest in inventory.digests.items() if mine[name] != digest]
        pieces = [
            (name, offset, min(PIECE, tensors[name].nbytes - offset))
            for name in differing
            for offset in range(0, tensors[name].nbytes, PIECE)
        ]
        shares = stripe(pieces, len(sources))
        errors: list[BaseException] = []
        buffers = {name: _Buffer(tensors[name]) for name in differing}

        def failed() -> bool:
            return bool(errors) or aborted()

        def pull(connection: socket.socket, share: list[tuple[str, int, int]]) -> None:
            _ask(connection, Request(generation, step, share), timeout, failed)
            for name, offset, length in share:
                receive_into(connection, buffers[name].bytes[offset : offset + length], timeout, failed)

        def pull_from(address: str, share: list[tuple[str, int, int]]) -> None:
            try:
                with _connect(address, key, timeout, failed) as connection:
                    pull(connection, share)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=pull_from, args=(address, share), name="torchpass-pull", daemon=True)
            for address, share in zip(sources[1:], shares[1:], strict=True)
            if share
        ]
        for thread in threads:
            thread.start()
        try:
            if shares[0]:
                pull(first, shares[0])
        except OSError as error:
            errors.append(error)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for buffer in buffers.values():
            buffer.store()
    if state.digests() != inventory.digests:
        raise StateError("the received state has another digest than its source")
    return inventory, sum(length for _, _, length in pieces)


def readings(
    source: str, key: bytes, generation: int, step: int, timeout: float, aborted: Callable[[], bool]
) -> bytes:
    """What the script of a source has read between its last backward pass before update `step` and that update. Raises
    OSError."""
    with _connect(source, key, timeout, aborted) as connection:
        _ask(connection, Request(generation, step, []), timeout, aborted)
        (size,) = struct.unpack("<I", receive(connection, 4, timeout, aborted))
        return receive(connection, size, timeout, aborted)


def stripe(pieces: list[tuple[str, int, int]], sources: int) -> list[list[tuple[str, int, int]]]:
    """Share pieces out so that the sources serve about equal numbers of bytes (largest first, to the least loaded)."""
    shares: list[list[tuple[str, int, int]]] = [[] for _ in range(sources)]
    loads = [0] * sources
    for piece in sorted(pieces, key=lambda p: (-p[2], p[0], p[1])):
        lightest = loads.index(min(loads))
        shares[lightest].append(piece)
        loads[lightest] += piece[2]
    return shares


class _Buffer:
    """Host memory to receive a tensor into: the tensor's own where that is possible."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._target = tensor
        direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        self._host = tensor if direct else torch.empty_like(tensor, device="cpu").contiguous()
        self.bytes = memoryview(_flat_bytes(self._host))

    def store(self) -> None:
        if self._host is not self._target:
            with torch.no_grad():
                self._target.copy_(self._host)


def _flat_bytes(tensor: torch.Tensor) -> memoryview:
    flat: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return flat


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return _flat_bytes(tensor.detach().cpu().contiguous())


def _connect(address: str, key: bytes, timeout: float, aborted: Callable[[], bool]) -> socket.socket:
    connection = dial(address, timeout, aborted)
    try:
        send(connection, _token(key, receive(connection, 16, timeout, aborted)), timeout, aborted)
    except OSError:
        connection.close()
        raise
    return connection


def _ask(connection: socket.socket, request: Request, timeout: float, aborted: Callable[[], bool]) -> None:
    body = msgspec.msgpack.encode(request)
    send(connection, struct.pack("<I", len(body)) + body, timeout, aborted)

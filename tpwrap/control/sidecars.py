"""Where ranks keep their small state outside themselves: a server in every supervisor, and its clients.

Two kinds of blobs are kept for a rank: its *set-up record* (results of the collectives before the first step,
one per rank) and its *sidecars* (one a step; the newest few). The server never looks inside.

A connection starts with a challenge: the server sends 16 random bytes, the client answers with
HMAC-SHA256(key, challenge + mode) and one mode byte. Mode `P` (put) then streams frames, each acknowledged by its
8-byte sequence number, read in C++ (`engine/native/buddies.cpp`). Mode `G` (get) asks for blobs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

SETUP_STEP = -1
"""`step` under which a rank's set-up record is kept."""
KEPT = 4
"""sidecars kept per rank; a newcomer asks for one of the newest two"""
MAX_BLOB = 1 << 30
HANDSHAKE_SECONDS = 10.0
_STOP_PERIOD = 0.05
"""seconds between looks at whether to go on waiting"""


class Put(NamedTuple):
    """A blob of `rank` for `step`. A writer of an older generation than the newest seen is a fenced worker that
    does not know it yet: its blobs are acknowledged and thrown away."""

    seq: int
    rank: int
    generation: int
    step: int
    blob: bytes

    def frame(self) -> bytes:
        return _PUT.pack(len(self.blob), self.seq, self.rank, self.generation, self.step) + self.blob


class Get(NamedTuple):
    rank: int
    step: int

    def frame(self) -> bytes:
        return _GET.pack(self.rank, self.step)


_PUT = struct.Struct("<IQIIi")
_GET = struct.Struct("<Ii")
_ACK = struct.Struct("<Q")
_ANSWER = struct.Struct("<q")


def _token(key: bytes, challenge: bytes, mode: bytes) -> bytes:
    return hmac.new(key, b"sidecar" + challenge + mode, hashlib.sha256).digest()


class SidecarServer:
    """Keeps blobs of ranks of other nodes, in memory, for as long as its supervisor lives.

    Threads and blocking sockets, not asyncio: a rank publishes every step, and what this costs is taken from the
    training beside it. (Measured: a quarter of the CPU time of the same server on asyncio streams.)
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._blobs: dict[int, dict[int, bytes]] = {}
        self._generation: dict[int, int] = {}
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    async def start(self, host: str) -> int:
        """Listen on a free port of `host` and return it."""
        self._socket = socket.create_server((host, 0), backlog=128)
        threading.Thread(target=self._accept, args=(self._socket,), name="sidecars", daemon=True).start()
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._socket.close()

    def keep(self, put: Put) -> None:
        with self._lock:
            if put.generation < self._generation.get(put.rank, 0):
                return
            self._generation[put.rank] = put.generation
            blobs = self._blobs.setdefault(put.rank, {})
            blobs[put.step] = put.blob
            if len(blobs) > KEPT:
                for old in sorted(step for step in blobs if step != SETUP_STEP)[:-KEPT]:
                    del blobs[old]

    def find(self, get: Get) -> bytes | None:
        with self._lock:
            return self._blobs.get(get.rank, {}).get(get.step)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="sidecar", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(HANDSHAKE_SECONDS)
            challenge = os.urandom(16)
            connection.sendall(challenge)
            answer = receive_exactly(connection, 33)
            mode = answer[32:]
            if mode not in (b"P", b"G") or not hmac.compare_digest(answer[:32], _token(self._key, challenge, mode)):
                return
            connection.settimeout(None)
            serve = self._serve_put if mode == b"P" else self._serve_get
            while serve(connection):
                pass

    def _serve_put(self, connection: socket.socket) -> bool:
        size, seq, rank, generation, step = _PUT.unpack(receive_exactly(connection, _PUT.size))
        if size > MAX_BLOB:
            return False
        put = Put(seq, rank, generation, step, receive_exactly(connection, size))
        self.keep(put)
        connection.sendall(_ACK.pack(put.seq))
        return True

    def _serve_get(self, connection: socket.socket) -> bool:
        blob = self.find(Get(*_GET.unpack(receive_exactly(connection, _GET.size))))
        connection.sendall(_ANSWER.pack(-1 if blob is None else len(blob)) + (blob or b""))
        return True


def connect(
    address: str, key: bytes, mode: bytes, timeout: float, stop: Callable[[], bool] = lambda: False
) -> socket.socket:
    """An authenticated blocking connection. Raises OSError, also when `stop` turns true while nobody answers (behind a
    cut link nobody ever does)."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    family, _, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        problem = sock.connect_ex(target)
        if problem == errno.EINPROGRESS:
            _await(sock, select.POLLOUT, deadline, stop)
            problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, os.strerror(problem))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _await(sock, select.POLLIN, deadline, stop)
        sock.settimeout(timeout)
        challenge = receive_exactly(sock, 16)
        sock.sendall(_token(key, challenge, mode) + mode)
        sock.settimeout(None if mode == b"P" else timeout)
    except OSError:
        sock.close()
        raise
    return sock


def _await(sock: socket.socket, event: int, deadline: float, stop: Callable[[], bool]) -> None:
    poll = select.poll()
    poll.register(sock, event)
    while not poll.poll(_STOP_PERIOD * 1000):
        if stop():
            raise ConnectionAbortedError(errno.ECONNABORTED, "given up")
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "no answer")


def fetch(address: str, key: bytes, rank: int, step: int, timeout: float) -> bytes | None:
    """Ask the server at `address` for one blob; None where it has none. Raises OSError."""
    with connect(address, key, b"G", timeout) as sock:
        sock.sendall(Get(rank, step).frame())
        (size,) = _ANSWER.unpack(receive_exactly(sock, _ANSWER.size))
        return None if size < 0 else receive_exactly(sock, size)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes or raise ConnectionError."""
    data = sock.recv(size, socket.MSG_WAITALL)  # one call and no copy, as a rule; with a timeout it may be a part
    if len(data) == size:
        return data
    buffer = bytearray(size)
    buffer[: len(data)] = data
    view = memoryview(buffer)[len(data) :]
    while len(view):
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionError("peer closed the connection")
        view = view[got:]
    return bytes(buffer)

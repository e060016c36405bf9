"""Where ranks keep their small state outside themselves: a server in every supervisor, and its clients.

Three kinds of blobs are kept for a rank: its *set-up record* (results of the collectives before the first step, one
per rank), the closed *segments* of its tape (all of them), and its *sidecars* (one a step; the newest few). The server
never looks inside. What is kept for ever has a step below zero.

A connection starts with a challenge: the server sends 16 random bytes, the client answers with
HMAC-SHA256(key, challenge + mode) and one mode byte. Mode `P` (put) then streams frames, each acknowledged by its
8-byte sequence number, read in C++ (`engine/native/buddies.cpp`). The other modes ask: `G` (get) for the blob of a
step, `C` (covering) for the newest sidecar up to a step, `S` (segments) for a row of segments.
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
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

SETUP_STEP = -1
"""`step` under which a rank's set-up record is kept."""
_ANY = -(1 << 31)
"""in place of a step: no blob is asked to be there"""
KEPT = 4
"""sidecars kept per rank; a newcomer asks for one of the newest two"""
MAX_BLOB = 1 << 30
HANDSHAKE_SECONDS = 10.0
_BATCH = 1 << 20
"""bytes of many small blobs that are sent in one go"""
_STOP_PERIOD = 0.05
"""seconds between looks at whether to go on waiting"""


def segment_step(i: int) -> int:
    """`step` under which segment `i` (0, 1, 2, ...) of a rank's tape is kept."""
    return SETUP_STEP - 1 - i


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


class GetSegments(NamedTuple):
    """`length` segments from number `first` on, of a server that also keeps the blob of step `beside`."""

    rank: int
    beside: int
    first: int
    length: int

    def frame(self) -> bytes:
        return _SEGMENTS.pack(*self)


_PUT = struct.Struct("<IQIIi")
_GET = struct.Struct("<Ii")
_SEGMENTS = struct.Struct("<IiII")
_ACK = struct.Struct("<Q")
_ANSWER = struct.Struct("<q")
_COVERING = struct.Struct("<qi")


def _token(key: bytes, challenge: bytes, mode: bytes) -> bytes:
    return hmac.new(key, b"sidecar" + challenge + mode, hashlib.sha256).digest()


class SidecarServer:
    """Keeps blobs of ranks of other nodes, in memory, for as long as its supervisor lives.

    Threads and blocking sockets, not asyncio: a rank publishes every step, and what this costs is taken from the
    training beside it. (Measured: a quarter of the CPU time of the same server on asyncio streams.)
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sidecars: dict[int, dict[int, bytes]] = {}
        self._lasting: dict[int, dict[int, bytes]] = {}
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
            if put.step < 0:
                self._lasting.setdefault(put.rank, {})[put.step] = put.blob
                return
            blobs = self._sidecars.setdefault(put.rank, {})
            blobs[put.step] = put.blob
            for old in sorted(blobs)[:-KEPT]:
                del blobs[old]

    def find(self, get: Get) -> bytes | None:
        with self._lock:
            return self._of(get.rank, get.step)

    def find_covering(self, get: Get) -> tuple[int, bytes] | None:
        """The newest sidecar of a step up to `get.step`, and its step."""
        with self._lock:
            blobs = self._sidecars.get(get.rank, {})
            step = max((step for step in blobs if step <= get.step), default=None)
            return None if step is None else (step, blobs[step])

    def find_segments(self, get: GetSegments) -> list[bytes | None]:
        with self._lock:
            if get.beside != _ANY and self._of(get.rank, get.beside) is None:
                return [None] * get.length
            kept = self._lasting.get(get.rank, {})
            return [kept.get(segment_step(i)) for i in range(get.first, get.first + get.length)]

    def _of(self, rank: int, step: int) -> bytes | None:
        return (self._lasting if step < 0 else self._sidecars).get(rank, {}).get(step)

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
            serve = _MODES.get(mode)
            if serve is None or not hmac.compare_digest(answer[:32], _token(self._key, challenge, mode)):
                return
            connection.settimeout(None)
            while serve(self, connection):
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
        connection.sendall(_answer(blob))
        return True

    def _serve_covering(self, connection: socket.socket) -> bool:
        found = self.find_covering(Get(*_GET.unpack(receive_exactly(connection, _GET.size))))
        step, blob = found or (_ANY, b"")
        connection.sendall(_COVERING.pack(-1 if found is None else len(blob), step) + blob)
        return True

    def _serve_segments(self, connection: socket.socket) -> bool:
        segments = self.find_segments(GetSegments(*_SEGMENTS.unpack(receive_exactly(connection, _SEGMENTS.size))))
        for batch in batches(map(_answer, segments)):
            connection.sendall(batch)
        return True


_MODES = {
    b"P": SidecarServer._serve_put,
    b"G": SidecarServer._serve_get,
    b"C": SidecarServer._serve_covering,
    b"S": SidecarServer._serve_segments,
}


def _answer(blob: bytes | None) -> bytes:
    return _ANSWER.pack(-1) if blob is None else _ANSWER.pack(len(blob)) + blob


def batches(parts: Iterable[bytes]) -> Iterator[bytes]:
    """`parts` joined to pieces of about 1 MB: one call of the system for many small ones."""
    batch: list[bytes] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part)
        if size >= _BATCH:
            yield b"".join(batch)
            batch, size = [], 0
    if batch:
        yield b"".join(batch)


def _never() -> bool:
    return False


def connect(address: str, key: bytes, mode: bytes, timeout: float, stop: Callable[[], bool] = _never) -> socket.socket:
    """An authenticated blocking connection. Raises OSError, also when `stop` turns true while nobody answers (behind a
    cut link nobody ever does)."""
    sock = dial(address, timeout, stop)
    try:
        challenge = receive(sock, 16, timeout, stop)
        send(sock, _token(key, challenge, mode) + mode, timeout, stop)
    except OSError:
        sock.close()
        raise
    return sock


def dial(address: str, timeout: float, stop: Callable[[], bool] = _never) -> socket.socket:
    """A blocking connection to "host:port". Raises OSError, also when `stop` turns true meanwhile."""
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
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        sock.close()
        raise
    return sock


def _await(sock: socket.socket, event: int, deadline: float, stop: Callable[[], bool]) -> None:
    poll = select.poll()
    poll.register(sock, event)
    while not poll.poll(_STOP_PERIOD * 1000):
        if stop():
            raise _given_up()
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "no answer")


def _given_up() -> OSError:
    return ConnectionAbortedError(errno.ECONNABORTED, "given up")


def receive_into(sock: socket.socket, view: memoryview, timeout: float, stop: Callable[[], bool] = _never) -> None:
    """Fill `view` from a blocking connection. Raises OSError, also after `timeout` seconds of silence and when `stop`
    turns true."""
    while len(view):
        if stop():
            raise _given_up()
        try:
            got = sock.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            _await(sock, select.POLLIN, time.monotonic() + timeout, stop)
            continue
        if got == 0:
            raise ConnectionError("peer closed the connection")
        view = view[got:]


def receive(sock: socket.socket, size: int, timeout: float, stop: Callable[[], bool] = _never) -> bytes:
    """Read `size` bytes; raises as `receive_into`."""
    buffer = bytearray(size)
    receive_into(sock, memoryview(buffer), timeout, stop)
    return bytes(buffer)


def send(sock: socket.socket, data: bytes, timeout: float, stop: Callable[[], bool] = _never) -> None:
    """Send on a blocking connection. Raises OSError, also when the peer reads nothing for `timeout` seconds and when
    `stop` turns true."""
    view = memoryview(data)
    while len(view):
        if stop():
            raise _given_up()
        try:
            view = view[sock.send(view, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            _await(sock, select.POLLOUT, time.monotonic() + timeout, stop)


def fetch(
    address: str, key: bytes, rank: int, step: int, timeout: float, stop: Callable[[], bool] = _never
) -> bytes | None:
    """Ask the server at `address` for one blob; None where it has none. Raises OSError."""
    with connect(address, key, b"G", timeout, stop) as sock:
        send(sock, Get(rank, step).frame(), timeout, stop)
        return _receive_answer(sock, timeout, stop)


def fetch_covering(
    address: str, key: bytes, rank: int, step: int, timeout: float, stop: Callable[[], bool] = _never
) -> tuple[int, bytes] | None:
    """Ask the server at `address` for its newest sidecar of a step up to `step`: that step and the blob, or None.
    Raises OSError."""
    with connect(address, key, b"C", timeout, stop) as sock:
        send(sock, Get(rank, step).frame(), timeout, stop)
        size, found = _COVERING.unpack(receive(sock, _COVERING.size, timeout, stop))
        return None if size < 0 else (found, receive(sock, size, timeout, stop))


def fetch_segments(
    address: str,
    key: bytes,
    rank: int,
    first: int,
    length: int,
    timeout: float,
    stop: Callable[[], bool] = _never,
    beside: int | None = None,
) -> Iterator[bytes | None]:
    """`length` segments of the server at `address` from number `first` on, as they come; None for each that it has not,
    and for all where it does not keep the blob of step `beside`. Raises OSError."""
    with connect(address, key, b"S", timeout, stop) as sock:
        send(sock, GetSegments(rank, _ANY if beside is None else beside, first, length).frame(), timeout, stop)
        for _ in range(length):
            yield _receive_answer(sock, timeout, stop)


def _receive_answer(sock: socket.socket, timeout: float, stop: Callable[[], bool]) -> bytes | None:
    (size,) = _ANSWER.unpack(receive(sock, _ANSWER.size, timeout, stop))
    return None if size < 0 else receive(sock, size, timeout, stop)


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

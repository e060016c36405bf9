"""Where ranks keep their small state outside themselves: a server in every supervisor, and its clients.

Two kinds of blobs are kept for a rank: its *set-up record* (results of the collectives before the first step,
one per rank) and its *sidecars* (one a step; the newest few). The server never looks inside.

A connection starts with a challenge: the server sends 16 random bytes, the client answers with
HMAC-SHA256(key, challenge + mode) and one mode byte. Mode `P` (put) then streams frames, each acknowledged by its
8-byte sequence number, read in C++ (`engine/native/buddies.cpp`). Mode `G` (get) asks for blobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import socket
import struct

import msgspec

SETUP_STEP = -1
"""`step` under which a rank's set-up record is kept."""
KEPT = 4
"""sidecars kept per rank; a newcomer asks for one of the newest two"""
MAX_BLOB = 1 << 30


class Put(msgspec.Struct, frozen=True, array_like=True):
    """A blob of `rank` for `step`. A writer of an older generation than the newest seen is a fenced worker that
    does not know it yet: its blobs are acknowledged and thrown away."""

    seq: int
    rank: int
    generation: int
    step: int
    blob: bytes


class Get(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    step: int


_put = msgspec.msgpack.Decoder(Put)
_get = msgspec.msgpack.Decoder(Get)


def _token(key: bytes, challenge: bytes, mode: bytes) -> bytes:
    return hmac.new(key, b"sidecar" + challenge + mode, hashlib.sha256).digest()


def frame(message: Put | Get) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


class SidecarServer:
    """Keeps blobs of ranks of other nodes, in memory, for as long as its supervisor lives."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._blobs: dict[int, dict[int, bytes]] = {}
        self._generation: dict[int, int] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> int:
        """Listen on a free port of `host` and return it."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def keep(self, put: Put) -> None:
        if put.generation < self._generation.get(put.rank, -1):
            return
        self._generation[put.rank] = put.generation
        blobs = self._blobs.setdefault(put.rank, {})
        blobs[put.step] = put.blob
        for old in sorted(step for step in blobs if step != SETUP_STEP)[:-KEPT]:
            del blobs[old]

    def find(self, get: Get) -> bytes | None:
        return self._blobs.get(get.rank, {}).get(get.step)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
            challenge = os.urandom(16)
            writer.write(challenge)
            answer = await asyncio.wait_for(reader.readexactly(33), 10)
            mode = answer[32:]
            if mode in (b"P", b"G") and hmac.compare_digest(answer[:32], _token(self._key, challenge, mode)):
                while True:
                    (size,) = struct.unpack("<I", await reader.readexactly(4))
                    if size > MAX_BLOB:
                        break
                    body = await reader.readexactly(size)
                    if mode == b"P":
                        put = _put.decode(body)
                        self.keep(put)
                        writer.write(struct.pack("<Q", put.seq))
                    else:
                        blob = self.find(_get.decode(body))
                        writer.write(struct.pack("<q", -1 if blob is None else len(blob)) + (blob or b""))
                    await writer.drain()
        writer.close()


def connect(address: str, key: bytes, mode: bytes, timeout: float) -> socket.socket:
    """An authenticated blocking connection. Raises OSError."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = receive_exactly(sock, 16)
        sock.sendall(_token(key, challenge, mode) + mode)
        sock.settimeout(None if mode == b"P" else timeout)
    except OSError:
        sock.close()
        raise
    return sock


def fetch(address: str, key: bytes, rank: int, step: int, timeout: float) -> bytes | None:
    """Ask the server at `address` for one blob; None where it has none. Raises OSError."""
    with connect(address, key, b"G", timeout) as sock:
        sock.sendall(frame(Get(rank, step)))
        (size,) = struct.unpack("<q", receive_exactly(sock, 8))
        return None if size < 0 else receive_exactly(sock, size)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes or raise ConnectionError."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while len(view):
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionError("peer closed the connection")
        view = view[got:]
    return bytes(buffer)

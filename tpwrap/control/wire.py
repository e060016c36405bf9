"""Frames: how messages travel, and how a peer proves that it belongs to the job.

Two links, one framing (u32 little-endian length, then the body; at most 16 MiB):

* worker <-> supervisor, a unix socket inside one node: the body is the msgpack of the message. The kernel
  tells who is at the other end (SO_PEERCRED), so nothing more is needed.
* supervisor <-> coordinator, TCP: first a mutual challenge with the job's key, then every body carries a MAC
  over (direction, counter, payload) under a key of that connection. A forged, replayed, reordered or cut
  frame closes the connection; nothing is ever decoded before its MAC has been checked.

`FrameBuffer`, `Handshake` and `Seal` do no I/O; `Channel` is the thin asyncio shell around them.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any, Generic, Literal, TypeVar

import msgspec

MAX_FRAME = 16 * 1024 * 1024
MAC_SIZE = 16
NONCE_SIZE = 32
HANDSHAKE_SECONDS = 10.0
_MAGIC = b"TPW1"
_LENGTH = struct.Struct("<I")
_COUNTER = struct.Struct("<Q")
_HANDSHAKE_FRAME = 128
_CHUNK = 256 * 1024

Role = Literal["client", "server"]
M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


class FrameError(ConnectionError):
    """The bytes on a link break the rules; the only answer is to close it."""


class HandshakeError(FrameError):
    """The peer does not hold this job's key, or does not speak this protocol."""


# --- sans I/O -----------------------------------------------------------------------------------------


def frame(body: bytes) -> bytes:
    """One frame around `body`."""
    if len(body) > MAX_FRAME:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def pack(message: Any) -> bytes:
    """A message (or a plain string) as one whole frame of the unix socket: length and msgpack."""
    return frame(_encoder.encode(message))


class FrameBuffer:
    """Cuts a byte stream into frame bodies."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> bytes | None:
        """The next whole body, or None until more bytes come. FrameError when a frame is over the limit."""
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self.limit:
            raise FrameError(f"a frame of {length} bytes is over the limit of {self.limit}")
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return body

    @property
    def partial(self) -> bool:
        """True while bytes of an unfinished frame are held: at EOF, the frame was cut."""
        return bool(self._data)


class Seal:
    """Signs what one side sends and checks what it receives, each direction under its own counter."""

    def __init__(self, session_key: bytes, role: Role) -> None:
        self._key = session_key
        self._out, self._in = (b">", b"<") if role == "client" else (b"<", b">")
        self._sent = 0
        self._received = 0

    def close(self, payload: bytes) -> bytes:
        """payload -> frame body."""
        mac = self._mac(self._out, self._sent, payload)
        self._sent += 1
        return mac + payload

    def open(self, body: bytes) -> bytes:
        """frame body -> payload. FrameError unless it is exactly the next frame that the peer signed."""
        mac, payload = body[:MAC_SIZE], body[MAC_SIZE:]
        if not hmac.compare_digest(mac, self._mac(self._in, self._received, payload)):
            raise FrameError(
                f"frame {self._received} carries a wrong signature (forged, replayed or reordered)"
            )
        self._received += 1
        return payload

    def _mac(self, direction: bytes, counter: int, payload: bytes) -> bytes:
        return _keyed(self._key, direction, _COUNTER.pack(counter), payload, size=MAC_SIZE)


class Handshake:
    """Mutual challenge: three frames, after which both sides hold the same fresh key.

        client -> server   magic, nonce
        server -> client   nonce, proof
        client -> server   proof

    Each proof covers both nonces and the role, so that neither side can be made to answer for the other.
    `send()` gives the bodies to send, `receive(body)` takes the peer's; `seal` is set once it is `done`.
    """

    def __init__(self, role: Role, key: bytes, nonce: bytes | None = None) -> None:
        self.role: Role = role
        self.seal: Seal | None = None
        self._key = _keyed(b"", key, size=32)  # any length of job key
        self._nonce = os.urandom(NONCE_SIZE) if nonce is None else nonce
        self._outbox: list[bytes] = [_MAGIC + self._nonce] if role == "client" else []
        self._nonces: bytes | None = None

    @property
    def done(self) -> bool:
        return self.seal is not None

    def send(self) -> list[bytes]:
        out, self._outbox = self._outbox, []
        return out

    def receive(self, body: bytes) -> None:
        if self.role == "client":
            self._server_answer(body)
        elif self._nonces is None:
            self._client_start(body)
        else:
            self._client_answer(body)

    def _client_start(self, body: bytes) -> None:
        if len(body) != len(_MAGIC) + NONCE_SIZE or not body.startswith(_MAGIC):
            raise HandshakeError("the peer does not speak this protocol")
        self._nonces = body[len(_MAGIC) :] + self._nonce
        self._outbox.append(self._nonce + self._proof(b"server", self._nonces))

    def _server_answer(self, body: bytes) -> None:
        nonce, proof = body[:NONCE_SIZE], body[NONCE_SIZE:]
        nonces = self._nonce + nonce
        if len(nonce) != NONCE_SIZE or not hmac.compare_digest(proof, self._proof(b"server", nonces)):
            raise HandshakeError("the peer does not hold this job's key")
        self._outbox.append(self._proof(b"client", nonces))
        self._finish(nonces)

    def _client_answer(self, body: bytes) -> None:
        assert self._nonces is not None
        if not hmac.compare_digest(body, self._proof(b"client", self._nonces)):
            raise HandshakeError("the peer does not hold this job's key")
        self._finish(self._nonces)

    def _proof(self, who: bytes, nonces: bytes) -> bytes:
        return _keyed(self._key, who, nonces, size=32)

    def _finish(self, nonces: bytes) -> None:
        self.seal = Seal(_keyed(self._key, b"session", nonces, size=32), self.role)


def _keyed(key: bytes, *parts: bytes, size: int) -> bytes:
    mac = blake2b(key=key, digest_size=size)
    for part in parts:
        mac.update(part)
    return mac.digest()


# --- asyncio: TCP between supervisor and coordinator -------------------------------------------------


class Channel(Generic[M]):
    """An authenticated connection that carries messages of one type in."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seal: Seal,
        buffer: FrameBuffer,
        decoder: msgspec.msgpack.Decoder[M],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._seal = seal
        self._buffer = buffer
        self._decoder = decoder
        self._closed = False
        self.why_closed = ""
        """after `receive` gave None: one line on why"""

    @staticmethod
    async def connect(host: str, port: int, key: bytes, decoder: msgspec.msgpack.Decoder[M]) -> Channel[M]:
        """Connect and prove to each other that both hold `key`. HandshakeError (an OSError) if not."""
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), HANDSHAKE_SECONDS)
        except asyncio.TimeoutError:
            raise ConnectionError(f"no answer from {host}:{port}") from None
        try:
            return await asyncio.wait_for(_greet("client", key, reader, writer, decoder), HANDSHAKE_SECONDS)
        except (asyncio.TimeoutError, OSError) as error:
            _abort(writer)
            raise HandshakeError(f"no job of ours at {host}:{port}: {error or 'no answer'}") from None
        except BaseException:
            _abort(writer)
            raise

    def post(self, message: Any) -> None:
        """Queue `message` without waiting. After the connection is gone it is dropped: `receive` tells."""
        if self._closed or self._writer.is_closing():
            return
        payload = _encoder.encode(message)
        if len(payload) + MAC_SIZE > MAX_FRAME:
            raise FrameError(f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME}")
        self._writer.write(frame(self._seal.close(payload)))

    async def send(self, message: Any) -> None:
        """Like `post`, but waits while the peer reads too slowly."""
        self.post(message)
        if self._closed:
            return
        try:
            await self._writer.drain()
        except OSError:
            self.close()

    async def receive(self) -> M | None:
        """The next message; None once the connection is closed, cut or broken (`why_closed` says which)."""
        while not self._closed:
            try:
                body = self._buffer.next()
                if body is not None:
                    return self._decoder.decode(self._seal.open(body))
                data = await self._reader.read(_CHUNK)
            except FrameError as error:
                return self._shut(str(error))
            except msgspec.MsgspecError as error:
                return self._shut(f"a message that this version does not know: {error}")
            except OSError as error:
                return self._shut(f"connection lost: {error.strerror or error}".lower())
            if not data:
                cut = " in the middle of a message" if self._buffer.partial else ""
                return self._shut(f"connection closed{cut}")
            self._buffer.feed(data)
        return None

    def close(self) -> None:
        """Close after what is queued has been sent. Harmless when already closed."""
        if not self._closed:
            self._closed = True
            self.why_closed = self.why_closed or "closed here"
            self._writer.close()

    def abort(self) -> None:
        """Close at once, dropping what is queued: for a peer that does not read."""
        self.close()
        _abort(self._writer)

    def _shut(self, why: str) -> M | None:
        self.why_closed = why
        self.close()
        return None


async def serve(
    host: str,
    port: int,
    key: bytes,
    decoder: msgspec.msgpack.Decoder[M],
    handler: Callable[[Channel[M]], Awaitable[None]],
) -> asyncio.Server:
    """Listen; `handler` runs for each peer that has proved it holds `key`. Others are closed in silence."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await asyncio.wait_for(
                _greet("server", key, reader, writer, decoder), HANDSHAKE_SECONDS
            )
        except (asyncio.TimeoutError, OSError):
            _abort(writer)
            return
        except BaseException:
            _abort(writer)
            raise
        try:
            await handler(channel)
        finally:
            channel.close()

    return await asyncio.start_server(greet, host, port, backlog=4096)


async def _greet(
    role: Role,
    key: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    decoder: msgspec.msgpack.Decoder[M],
) -> Channel[M]:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handshake = Handshake(role, key)
    buffer = FrameBuffer(limit=_HANDSHAKE_FRAME)  # a stranger cannot make us hold more than this
    while True:
        for body in handshake.send():
            writer.write(frame(body))
        if handshake.seal is not None:
            buffer.limit = MAX_FRAME
            return Channel(reader, writer, handshake.seal, buffer, decoder)
        received = buffer.next()
        if received is not None:
            handshake.receive(received)
            continue
        data = await reader.read(_CHUNK)
        if not data:
            raise HandshakeError("the peer closed the connection (another job's key?)")
        buffer.feed(data)


def _abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


# --- the unix socket between a worker and its supervisor ---------------------------------------------


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The body of the next frame; None at EOF, also in the middle of a frame. FrameError over the limit."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME:
            raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
        return await reader.readexactly(length)
    except FrameError:
        raise
    except (asyncio.IncompleteReadError, OSError):
        return None


def send_blocking(sock: socket.socket, message: Any) -> None:
    """Send one message as a frame. The caller holds a lock where several threads send."""
    sock.sendall(pack(message))


def receive_blocking(sock: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """The next message; None when the peer is gone. FrameError or msgspec.MsgspecError when it is broken."""
    header = _receive_exactly(sock, _LENGTH.size)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
    body = _receive_exactly(sock, length)
    return None if body is None else decoder.decode(body)


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    got = 0
    while got < size:
        try:
            count = sock.recv_into(view[got:])
        except OSError:
            return None
        if count == 0:
            return None
        got += count
    return bytes(data)

"""A worker process as its supervisor sees it, and the socket between them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import struct
import termios
from collections.abc import Callable

from tpwrap.control import wire
from tpwrap.control.messages import CoordinatorToWorker
from tpwrap.launch import processes
from tpwrap.launch.logs import Labels, Relay

_PEER = struct.Struct("3i")


class Worker:
    """One process tree that holds a rank or waits for one.

    pid: the process that we started; 0 until it is. peer: the process in that tree which speaks to us (the
    same one, unless a script stands between); 0 until it has connected.
    """

    def __init__(self, name: str, slot: int, labels: Labels) -> None:
        self.name = name
        self.slot = slot
        self.labels = labels
        self.pid = 0
        self.peer = 0
        self.link: WorkerLink | None = None
        self.relays: list[Relay] = []
        self.rank: int | None = None
        self.warm = False
        """it has reported WarmReady"""
        self.settled = False
        """as a rank it has left start-up or recovery behind, so that another process may warm up beside it"""
        self.leaving = False
        """it has finished, or been asked to end"""
        self.hung = False
        self.returncode: int | None = None
        self.stopped_since: float | None = None

    def send(self, message: CoordinatorToWorker) -> None:
        """To a worker that has gone (or whose exit is about to be reported) it is dropped."""
        if self.link is not None:
            self.link.send(message)

    def alive(self) -> list[int]:
        """The pids of it that we may signal: its root while not reaped, and the peer while connected."""
        pids = [self.pid] if self.pid and self.returncode is None else []
        if self.peer and self.peer != self.pid and self.link is not None and not self.link.closed:
            pids.append(self.peer)
        return pids

    def terminate(self) -> None:
        """Ask it to end."""
        self.leaving = True
        for pid in self.alive():
            processes.send_signal(pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it now, with everything below it."""
        roots = self.alive()
        below = [pid for root in roots for pid in processes.family(root)]
        for pid in [*roots, *below]:
            processes.send_signal(pid, signal.SIGKILL)

    def is_stopped(self) -> bool:
        """Halted by a signal (state T). A process under a debugger (t) is not."""
        return any(processes.state(pid) == "T" for pid in self.alive())


class WorkerLink(asyncio.Protocol):
    """The supervisor's end of a worker's socket. Frames are handled as they come, in order.

    on_hello: the first frame, the worker's name: returns its Worker, or None to refuse the connection.
    on_frame: each further frame. on_lost: the connection has ended.
    """

    def __init__(
        self,
        on_hello: Callable[[bytes, WorkerLink], Worker | None],
        on_frame: Callable[[Worker, bytes], None],
        on_lost: Callable[[Worker], None],
    ) -> None:
        self._on_hello = on_hello
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = wire.FrameBuffer()
        self._worker: Worker | None = None
        self.peer = 0
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._socket: socket.socket = transport.get_extra_info("socket")
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        self.peer, uid, _ = _PEER.unpack(credentials)
        if uid != os.getuid():
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer.feed(data)
        try:
            while not self.closed and (body := self._buffer.next()) is not None:
                if self._worker is not None:
                    self._on_frame(self._worker, body)
                else:
                    self._worker = self._on_hello(body, self)
                    if self._worker is None:
                        self._transport.abort()
                        return
        except wire.FrameError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._worker is not None:
            self._on_lost(self._worker)

    def send(self, message: CoordinatorToWorker) -> None:
        if not self.closed:
            self._transport.write(wire.pack(message))

    def unread(self) -> int:
        """Bytes that have arrived but were not handled yet."""
        if self.closed or self._socket.fileno() < 0:
            return 0
        count = bytearray(4)
        fcntl.ioctl(self._socket.fileno(), termios.FIONREAD, count)
        return int.from_bytes(count, "little")

    def close(self) -> None:
        self._transport.close()

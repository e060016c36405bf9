"""The worker's end of the socket to its supervisor."""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable

import msgspec

from tpwrap.control import wire
from tpwrap.control.messages import CoordinatorToWorker, WorkerMessage

_decoder: msgspec.msgpack.Decoder[CoordinatorToWorker] = msgspec.msgpack.Decoder(CoordinatorToWorker)


class Link:
    """Sends from any thread; one thread receives and calls `handle` for each message, in order.

    When the supervisor is gone the worker has no business left: it ends at once, so that no orphan trains on.
    """

    def __init__(self, path: str, worker: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._sending = threading.Lock()
        self.closing = False
        self.send(worker)

    def send(self, message: WorkerMessage | str) -> None:
        """Queue one message (blocks only while the socket is full)."""
        with self._sending:
            try:
                wire.send_blocking(self._socket, message)
            except OSError:
                self._lost()

    def start(self, handle: Callable[[CoordinatorToWorker], None]) -> None:
        def receive() -> None:
            try:
                while (message := wire.receive_blocking(self._socket, _decoder)) is not None:
                    handle(message)
            except BaseException:
                traceback.print_exc()
                os._exit(70)  # nobody could reach this worker any more: better it is replaced
            self._lost()

        threading.Thread(target=receive, name="torchpass-link", daemon=True).start()

    def _lost(self) -> None:
        if not self.closing:
            os._exit(75)

"""The launcher's side of the template: starts it, learns the store's port, has it fork the supervisors."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from tpwrap.control import wire
from tpwrap.launch.interpreter import module_command
from tpwrap.launch.node import NodeSpec
from tpwrap.launch.template import TemplateReply, TemplateRequest


class StartError(Exception):
    """A process that everything else needs has ended; it has said why on stderr."""


class Forge:
    """Made by `start`. It keeps the store alive: close it last."""

    def __init__(self, pid: int, sock: socket.socket, store: tuple[int, int] | None) -> None:
        self.pid = pid
        self._sock = sock
        self._store = store
        """our ends of the pipes to the store's standard input and from its standard output"""
        self._store_reader: asyncio.StreamReader | None = None
        self._store_transport: asyncio.ReadTransport | None = None

    @staticmethod
    def start(store_host: str | None, preload: bool, environment: Mapping[str, str]) -> Forge:
        """Start the template. store_host: where the store shall listen; None: another launcher has it.
        preload: whether it imports torch (workers are forked)."""
        ours, theirs = socket.socketpair()
        given: list[int] = []
        store: tuple[int, int] | None = None
        if store_host is not None:
            store_stdin, store_input = os.pipe()
            store_output, store_stdout = os.pipe()
            given, store = [store_stdin, store_stdout], (store_input, store_output)
        process = subprocess.Popen(
            module_command(
                "tpwrap.launch.template",
                str(theirs.fileno()),
                str(os.getpid()),
                "preload" if preload else "bare",
                *([] if store_host is None else [store_host, *map(str, given)]),
            ),
            pass_fds=[theirs.fileno(), *given],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher alone
            # Threads do not survive a fork, so it runs with one; workers get what `environment` says.
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        for fd in given:
            os.close(fd)
        process.returncode = 0  # the launcher's Reaper waits for it
        return Forge(process.pid, ours, store)

    async def store_port(self) -> int:
        """Wait until the store listens."""
        self._store_reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self._store_reader)
        assert self._store is not None
        pipe = os.fdopen(self._store[1], "rb", buffering=0)
        self._store_transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        word, _, port = (await self._store_reader.readline()).decode().partition(" ")
        if word != "PORT":
            raise StartError("the process that imports torch and holds the store has ended")
        return int(port)

    async def fork(self, nodes: Sequence[NodeSpec]) -> list[int]:
        """Have the supervisors forked; returns their pids."""
        reader, writer = await asyncio.open_connection(sock=self._sock)
        writer.write(wire.pack(TemplateRequest(list(nodes))))
        body = await wire.read_frame(reader)
        writer.close()
        if body is None:
            raise StartError("the process that forks the supervisors has ended")
        return msgspec.msgpack.decode(body, type=TemplateReply).pids

    async def store_lost(self) -> None:
        """Returns when the store has ended."""
        assert self._store_reader is not None
        while await self._store_reader.read(4096):
            pass

    def close(self) -> None:
        """End the store."""
        if self._store_transport is not None:
            self._store_transport.close()
        if self._store is not None:
            os.close(self._store[0])
        self._sock.close()

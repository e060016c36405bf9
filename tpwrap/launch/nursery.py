"""The supervisor's side of the zygote: keeps one alive, and has it fork workers.

A zygote that is lost is made again at once, not when the next worker is needed: it imports torch for seconds, and a
rank may be waiting by then.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable

from tpwrap.launch import processes, zygote
from tpwrap.launch.interpreter import module_command
from tpwrap.launch.node import NodeSpec
from tpwrap.launch.reaper import Reaper

_LONG_LIFE = 30.0
"""a zygote that lived for less counts as one that will not live"""
_FIRST_BACKOFF = 0.25
_LAST_BACKOFF = 30.0
_MOST_LOST_LOADING = 2
"""zygotes lost while they imported modules: then one of the modules may be to blame"""


class Nursery:
    """One a node. `say` prints a line for people."""

    def __init__(self, spec: NodeSpec, reaper: Reaper, say: Callable[[str], None], patience: float) -> None:
        self._spec = spec
        self._reaper = reaper
        self._say = say
        self._patience = patience
        """so long may it take to answer, imports included, before the zygote counts as stuck"""
        self._sock: socket.socket | None = None
        self.pid = 0
        """of the zygote; 0 while there is none"""
        self._born = 0.0
        self._short_lives = 0
        self._stopped_since: float | None = None
        self._closed = False
        self._asking = asyncio.Lock()
        self.lock = asyncio.Lock()
        """held while a worker is being made that nobody knows yet"""
        self._modules: dict[str, None] = {}
        self._loaded: set[str] = set()
        """those of them that the zygote has tried to import"""
        self._lost_loading = 0
        # What a library computes may depend on its threads, and it reads their number when it is loaded. Zygotes have
        # one thread; where workers have more, they must load by themselves.
        self._loads = spec.command.python is not None and spec.env.get("OMP_NUM_THREADS") == "1"

    def adopt(self, sock: socket.socket, pid: int) -> None:
        """Go on with a zygote that was forked from the template."""
        self._sock, self.pid, self._born = sock, pid, self._now()
        self._stopped_since = None
        self._loaded.clear()
        self._reaper.watch(pid, lambda _: self._ended(pid))

    def learn(self, modules: Iterable[str]) -> None:
        """Modules that the script imports: the zygote shall have them before it forks the next worker, so that each of
        its workers does."""
        self._modules.update(dict.fromkeys(modules))

    async def fork(self, spawn: zygote.Spawn, stdout: int, stderr: int, on_exit: Callable[[int], None]) -> int:
        """Have a worker forked; returns its pid. OSError if that is not possible; ZygoteLost if it is unknown whether
        there is such a worker now, so that its name must not be used again."""
        async with self._asking:
            await self._load(stdout, stderr)
            async with self.lock:
                with self._reaper.expecting():
                    reply = await self._ask(spawn, stdout, stderr)
                    if not reply.pid:
                        raise OSError(reply.problem)
                    self._reaper.watch(reply.pid, on_exit)
                    return reply.pid

    async def _load(self, stdout: int, stderr: int) -> None:
        """Have the zygote import what it lacks. Afterwards it is ready to fork at once, also one that was just made."""
        missing = [name for name in self._modules if name not in self._loaded] if self._loads else []
        try:
            reply = await self._ask(zygote.Load(missing), stdout, stderr)
        except zygote.ZygoteLost:
            self._lost_loading += bool(missing)
            self._loads = self._loads and self._lost_loading < _MOST_LOST_LOADING
            raise
        self._loaded.update(missing)
        if reply.problem:
            self._say(f"warm processes on node {self._spec.node} import for themselves: {reply.problem}")
            self._loads = False
            self._sock = None
            await self._ask(zygote.Load([]), stdout, stderr)

    async def _ask(self, request: zygote.Load | zygote.Spawn, stdout: int, stderr: int) -> zygote.Reply:
        loop = asyncio.get_running_loop()
        sock = self._sock or self.start()
        stuck = loop.call_later(self._patience, processes.send_signal, self.pid, signal.SIGKILL)
        try:
            return await loop.run_in_executor(None, zygote.request, sock, request, stdout, stderr)
        except zygote.ZygoteLost:
            if self._sock is sock:
                self._sock = None
            raise
        finally:
            stuck.cancel()

    def start(self) -> socket.socket:
        """Execute a new zygote; it answers once it has imported torch."""
        ours, theirs = socket.socketpair()
        preload = "preload" if self._spec.command.python is not None else "bare"
        process = subprocess.Popen(
            module_command("tpwrap.launch.zygote", str(theirs.fileno()), preload, f"tp-zygote{self._spec.node}"),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=self._spec.env | {"OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        process.returncode = 0  # the reaper waits for it
        self.adopt(ours, process.pid)
        return ours

    def watch_stopped(self, limit: float) -> None:
        """A zygote that is halted (SIGSTOP) for longer than `limit` is killed, and so replaced."""
        if not self.pid or processes.state(self.pid) != "T":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = self._now()
        elif self._now() - self._stopped_since > limit:
            processes.send_signal(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let the zygote end."""
        self._closed = True
        if self._sock is not None:
            self._sock.close()

    def _ended(self, pid: int) -> None:
        if pid != self.pid:
            return  # there is another one already
        if self._now() - self._born < _LONG_LIFE:
            self._short_lives += 1
        else:
            self._short_lives = 0
        self._sock, self.pid = None, 0
        delay = min(_FIRST_BACKOFF * 2**self._short_lives, _LAST_BACKOFF) if self._short_lives > 1 else 0.0
        asyncio.get_running_loop().call_later(delay, self._again)

    def _again(self) -> None:
        if self._closed or self._sock is not None:
            return
        try:
            self.start()
        except OSError as e:
            self._say(f"node {self._spec.node}: cannot start the process that forks workers: {e.strerror or e}")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

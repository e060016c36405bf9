"""Waits for child processes inside an asyncio loop, including those that came by being orphaned.

A subreaper must reap whatever the kernel hands it, so one waiter serves the process: nothing else here may
call waitpid.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OnExit = Callable[[int], None]
"""Called with the return code (as in subprocess, negative for a signal) while the process is still a zombie,
so its pid and its process group cannot yet belong to anybody else."""


class Reaper:
    """`watch(pid, callback)`; all other children are reaped silently."""

    def __init__(self) -> None:
        self._watched: dict[int, OnExit] = {}
        self._expecting = 0
        self._unclaimed: dict[int, int] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self._collect)

    def watch(self, pid: int, on_exit: OnExit) -> None:
        """Call `on_exit` when the child `pid` ends (soon, if it has)."""
        if pid in self._unclaimed:
            self._loop.call_soon(on_exit, self._unclaimed.pop(pid))
            return
        self._watched[pid] = on_exit
        self._loop.call_soon(self._collect)  # its SIGCHLD may have come before we knew it

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """While a child is being made whose pid is not known yet, keep the status of unknown ones."""
        self._expecting += 1
        try:
            yield
        finally:
            self._expecting -= 1
            if not self._expecting:
                self._unclaimed.clear()

    def close(self) -> None:
        """Reap no more, and hear no signal to end any more: the process is about to.

        asyncio closes the pipe that its signal handlers write to before it takes the handlers back. A signal between
        the two prints a traceback of nobody's concern.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _TO_END)
        self._loop.remove_signal_handler(signal.SIGCHLD)

    def _collect(self) -> None:
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            returncode = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            on_exit = self._watched.pop(info.si_pid, None)
            try:
                if on_exit is not None:
                    on_exit(returncode)
                elif self._expecting:
                    self._unclaimed[info.si_pid] = returncode
            finally:
                os.waitpid(info.si_pid, 0)

"""The output of workers: each line with a prefix on the terminal, and unprefixed in a file a rank.

A terminal may stop taking output (Ctrl-S, a pager), and the supervisor must go on answering heartbeats: a
thread does the writing. When it falls behind, the workers' pipes are not read, so that they wait in print(),
as they would without us.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from tpwrap.launch.repeats import Repeats

_HIGH_WATER = 4 << 20
_READ_SIZE = 1 << 16
_LAST_READS = 64  # more than a pipe holds: someone else still writes to it
_LONGEST_LINE = 1 << 16
_PARTIAL_LINE_SECONDS = 1.0


class Writer:
    """Writes to file descriptors in order, in a thread. A descriptor that fails once is written no more."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes] | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._relief: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="torchpass-output", daemon=True)
        self._thread.start()

    def write(self, fd: int, data: bytes) -> None:
        """Queue `data`; never blocks."""
        with self._lock:
            self._pending += len(data)
        self._queue.put((fd, data))

    def then(self, work: Callable[[], None]) -> None:
        """Have `work` done in the thread once all that is queued now is written."""
        self._queue.put(work)

    def when_relieved(self, callback: Callable[[], None]) -> bool:
        """If too much is queued: True, and `callback` is called (in the thread) when there is room again."""
        with self._lock:
            if self._pending < _HIGH_WATER:
                return False
            self._relief.append(callback)
            return True

    def close(self, timeout: float) -> None:
        """Write what is queued, for at most `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        broken: set[int] = set()
        while (item := self._queue.get()) is not None:
            if callable(item):
                item()
                continue
            fd, data = item
            if fd not in broken:
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(fd, view) :]
                except OSError:
                    # A closed pipe, a full disk: training matters more than its log.
                    broken.add(fd)
            with self._lock:
                self._pending -= len(data)
                relieved = self._relief if self._pending < _HIGH_WATER // 2 else []
                if relieved:
                    self._relief = []
            for callback in relieved:
                callback()


class LogFiles:
    """The log files of one node, opened once each for appending."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, int] = {}

    def path(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def fd(self, name: str) -> int | None:
        """Descriptor of `name`.log, or None where it cannot be opened."""
        if name not in self._open:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._open[name] = os.open(self.path(name), flags, 0o644)
            except OSError:
                return None
        return self._open[name]


class Labels:
    """Who speaks: the prefix on the terminal and the name of the log file. Changes when a warm worker gets
    its rank."""

    def __init__(self, prefix: str, file: str) -> None:
        self.prefix = prefix
        self.file = file


class Relay:
    """Reads one pipe of a worker until its end."""

    def __init__(self, fd: int, terminal: int, labels: Labels, writer: Writer, files: LogFiles) -> None:
        self._fd = fd
        self._terminal = terminal
        self._labels = labels
        self._writer = writer
        self._files = files
        self._buffer = b""
        """of the line that the terminal has not seen"""
        self._unlogged = b""
        """of a line that may be one of the repeats"""
        self._repeats = Repeats([])
        self._held = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.closed = False
        os.set_blocking(fd, False)
        self._listen()

    def hold(self) -> None:
        """Read no more until `expect`: the worker waits when its pipe is full."""
        self._held = True
        if not self.closed:
            self._loop.remove_reader(self._fd)

    def expect(self, repeats: Repeats) -> None:
        """From here on drop these lines, as long as they come."""
        self._repeats = repeats
        self._held = False
        self._listen()

    def _listen(self) -> None:
        if not self.closed and not self._held:
            self._loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        """Take what is there now and stop."""
        for _ in range(_LAST_READS):
            if self.closed or not self._read():
                break
        self._end()

    def _readable(self) -> None:
        if self._writer.when_relieved(self._resume):
            self._loop.remove_reader(self._fd)
            return
        self._read()

    def _resume(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._listen)
        except RuntimeError:
            pass  # the loop is closed: the supervisor has ended

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, _READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._end()
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if self._repeats.expected:
            lines = self._drop_repeats(lines, data)
        else:
            self._log(self._unlogged + data)
            self._unlogged = b""
        shown = b"".join(self._show(line) for line in lines)
        if len(self._buffer) > _LONGEST_LINE:
            shown += self._take_partial()
        if shown:
            self._writer.write(self._terminal, shown)
        if self._buffer and self._timer is None:
            self._timer = self._loop.call_later(_PARTIAL_LINE_SECONDS, self._flush)
        elif not self._buffer and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return True

    def _drop_repeats(self, lines: list[bytes], data: bytes) -> list[bytes]:
        """Log what of `data` is new, and return what of `lines` is."""
        *whole, self._unlogged = (self._unlogged + data).split(b"\n")
        new = [not (self._repeats.expected and self._repeats.drop(line)) for line in whole]
        self._log(b"".join(line + b"\n" for line in itertools.compress(whole, new)))
        if len(self._unlogged) > _LONGEST_LINE:
            self._repeats.stop()
        if not self._repeats.expected:
            self._log(self._unlogged)
            self._unlogged = b""
        return list(itertools.compress(lines, new))

    def _log(self, data: bytes) -> None:
        log = self._files.fd(self._labels.file) if data else None
        if log is not None:
            self._writer.write(log, data)

    def _flush(self) -> None:
        """A line that does not end (a progress bar): show how it looks now."""
        self._timer = None
        shown = self._take_partial()
        if shown:
            self._writer.write(self._terminal, shown)

    def _take_partial(self) -> bytes:
        line, self._buffer = self._buffer, b""
        return self._show(line) if line.strip() else b""

    def _show(self, line: bytes) -> bytes:
        # Of a line that was overwritten with \r, a terminal would show the last version.
        visible = line.rstrip(b"\r").rpartition(b"\r")[2]
        return f"[{self._labels.prefix}] ".encode() + visible + b"\n"

    def _end(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._flush()
        self._log(self._unlogged)
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

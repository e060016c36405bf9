"""What the script writes: muted while a newcomer runs it up to its entry, and continued there.

Output is what goes to sys.stdout and sys.stderr, what is written through open() (see `virtual`), what functions like
os.remove do to the file system, and what whole libraries save (torch.save). Muted output is counted, and at the entry
everything goes on where the failed rank's stood.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import datetime
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from tpwrap.engine.script import virtual
from tpwrap.engine.script.patches import Patches

T = TypeVar("T")
Cross = Callable[[str, Callable[[], Any]], Any]
"""(kind, compute) -> compute(), recorded by a live rank, and as the failed rank recorded it in a fast-forward"""

_OFF, _MUTED, _LIVE = "off", "muted", "live"
_NOT_OUTPUT = ("/dev", "/proc", "/sys")
_LAST = 3
"""muted lines by which a supervisor finds the place in the log"""
_LONGEST = 4096
"""bytes of each of these"""
_OUR_THREADS = ("torchpass-", "sidecar")

_open, _stat, _abspath, _now, _clock = io.open, os.stat, os.path.abspath, datetime.now, time.time
_isdir, _mkdir, _rmdir, _unlink = os.path.isdir, os.mkdir, os.rmdir, os.unlink

_REMOVE = ("remove", "unlink", "rmdir", "removedirs", "rmtree")
_MOVE = ("rename", "renames", "replace", "move")
_COPY = ("copy", "copy2", "copyfile", "copytree")
_MAKE = ("mkdir", "symlink", "link")
_CHANGES: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (os, ("remove", "unlink", "rmdir", "removedirs", "rename", "renames", "replace", "truncate")),
    (os, ("symlink", "link", "utime", "chmod", "chown", "lchown", "mkdir")),
    (shutil, ("rmtree", "move", "copy", "copy2", "copyfile", "copytree", "copymode", "copystat", "chown")),
)


_SAVES: dict[str, dict[str, tuple[int, str]]] = {
    "torch": {"save": (1, "f")},
    "torch.jit": {"save": (1, "f")},
    "numpy": {"save": (0, "file"), "savez": (0, "file"), "savez_compressed": (0, "file"), "savetxt": (0, "fname")},
    "safetensors.torch": {"save_file": (1, "filename"), "save_model": (1, "filename")},
    "safetensors.numpy": {"save_file": (1, "filename")},
}
"""functions that save as a whole, by module; for each the argument that is the file, by position and name"""
_COLLECTIVE_SAVES = {"torch.distributed.checkpoint": ("save", "async_save", "save_state_dict")}
"""the same, and all ranks take part, so a fast-forward never runs them, whatever they write to"""


class Muted(NamedTuple):
    """What a fast-forward has not written.

    lines: complete ones on both streams. last: the last few of them, without their ends. calls: muted calls by kind.
    doubts: files that others write to as well, in which lines from between the entry and the failure can stand twice.
    """

    lines: int
    last: list[bytes]
    calls: dict[str, int]
    doubts: list[str]


class Outputs:
    """The output of one process. Everything here happens in the process that called `install`, not in its forks.

    cross: asked with "size" for the size in bytes of a file that is opened for appending or updating (-1: none), with
    "place" and "stamp" for how TensorBoard names its files; only in the thread that called `install`.
    aside: entered around a library's saving in a live rank, so that nothing in it is recorded: a fast-forward skips it.
    run_dir: the engine's own directory, which is left alone.
    """

    def __init__(
        self,
        cross: Cross | None = None,
        aside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        run_dir: str | None = None,
    ) -> None:
        self._cross_with = cross
        self.on_read: Callable[[str], None] | None = None
        """told of each file that is about to be opened for reading; may raise OSError"""
        self._aside = aside
        self._left_alone = [*_NOT_OUTPUT, *([_abspath(run_dir)] if run_dir else [])]
        self._state = _OFF
        self._redoing = False
        self._patches = Patches()
        self._files = virtual.VirtualFiles()
        self._heard = _Heard()
        self._ears: list[_Ear] = []
        self._calls: Counter[str] = Counter()
        self._event_writers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._temporary: list[str] = []
        self._made: list[str] = []
        """directories, in a fast-forward"""
        self._engine = threading.local()
        self._pid = self._thread = 0

    # --- life -------------------------------------------------------------------------------------

    def install(self, live: bool = False, again: bool = False) -> None:
        """Before the script starts. live: in a rank that runs for real, where only sizes are recorded. again: another
        process has run this rank for real before, from its start (until `caught_up`)."""
        self._pid, self._thread = os.getpid(), threading.get_ident()
        pairs = [(_open, self._replaced_open()), *([] if live and not again else self._replaced_changes())]
        if hasattr(sys.modules.get("pathlib"), "_NormalAccessor"):  # Python 3.10 has taken them into a class
            self._patch_accessor(live and not again)
        for name in (*_SAVES, *_COLLECTIVE_SAVES):
            # All that is there already in one go: the newcomer is waited for.
            if name in sys.modules:
                pairs += self._replaced_saves(sys.modules[name])
            else:
                self._patches.when_imported(name, lambda module: self._patches.everywhere(self._replaced_saves(module)))
        self._patches.everywhere(pairs)
        self._patches.when_imported("tensorboard.summary.writer.event_file_writer", self._replace_event_writer)
        self._patches.when_imported("torch.utils.tensorboard.writer", self._replace_summary_writer)
        if not live:
            for name in ("mkdtemp", "_mkstemp_inner"):
                original = getattr(tempfile, name)
                self._patches.put(tempfile, name, self._noting_temporary(original))
            self._ears = [_Ear(sys.stdout, self._heard), _Ear(sys.stderr, self._heard)]
            for ear in self._ears:
                ear.mute()
        self._redoing = again
        self._state = _LIVE if live else _MUTED

    def muted(self) -> Muted:
        """What was muted so far."""
        for writer in list(self._event_writers):
            writer.flush()
        for ear in self._ears:
            ear.flush()
        return Muted(self._heard.lines, list(self._heard.last), dict(self._calls), [])

    def go_live(self) -> Muted:
        """At the entry: all goes on for real. Raises OSError where a file that is open cannot be continued."""
        found = self.muted()
        doubts = self._files.go_live()
        for ear in self._ears:
            ear.unmute()
        self._ears = []
        self._state = _LIVE
        self._redoing = True
        return found._replace(doubts=doubts)

    def caught_up(self) -> None:
        """All that the failed rank can have done after the entry is done again. Until then a file that is already
        removed, or a directory that is already made, is no error."""
        self._redoing = False

    def uninstall(self) -> None:
        """All is as it was before `install`. What a fast-forward has muted is lost."""
        self._state = _OFF
        for ear in self._ears:
            ear.unmute()
        self._ears = []
        self._patches.undo()

    @contextlib.contextmanager
    def real(self) -> Iterator[None]:
        """What the engine itself does in the script's thread."""
        before = getattr(self._engine, "busy", False)
        self._engine.busy = True
        try:
            yield
        finally:
            self._engine.busy = before

    # --- who and what -----------------------------------------------------------------------------

    def _is(self, state: str) -> bool:
        """Whether the caller is the script in this state."""
        return (
            self._state == state
            and not getattr(self._engine, "busy", False)
            and os.getpid() == self._pid
            and not threading.current_thread().name.startswith(_OUR_THREADS)
        )

    def _path(self, file: Any) -> str | None:
        """The absolute path of a file that is the script's own output, else None."""
        if isinstance(file, int):
            return None
        try:
            path = _abspath(os.fsdecode(file))
        except TypeError:
            return None
        if any(path == place or path.startswith(place + os.sep) for place in (*self._left_alone, *self._temporary)):
            return None
        try:
            kind = _stat(path).st_mode
        except (OSError, ValueError):
            return path
        return path if stat.S_ISREG(kind) or stat.S_ISDIR(kind) else None

    def _cross(self, kind: str, compute: Callable[[], T]) -> T:
        if self._cross_with is None or threading.get_ident() != self._thread:
            return compute()
        value: T = self._cross_with(kind, compute)
        return value

    # --- open -------------------------------------------------------------------------------------

    def _replaced_open(self) -> Callable[..., Any]:
        @functools.wraps(_open)
        def open(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if opener is None and isinstance(mode, str) and not isinstance(file, int):
                options = {"buffering": buffering, "encoding": encoding, "errors": errors, "newline": newline}
                if self.on_read is not None and not set(mode) & set("wax+"):
                    self._reads(file)
                if self._is(_MUTED):
                    return self._open_muted(file, mode, options)
                if set(mode) & set("wax+") and self._is(_LIVE):
                    return self._open_live(file, mode, options)
            return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)

        return open

    def _reads(self, file: Any) -> None:
        if self.on_read is not None and (self._is(_MUTED) or self._is(_LIVE)):
            path = self._path(file)
            if path is not None and path not in self._files:
                self.on_read(path)

    def _open_muted(self, file: Any, mode: str, options: dict[str, Any]) -> Any:
        path = self._path(file)
        writes = bool(set(mode) & set("wax+"))
        if path is None or (not writes and path not in self._files):
            return _open(file, mode, **options)
        size = self._recorded_size(path) if set(mode) & set("ax+") else None
        opened = self._files.open(path, file, mode, size, options)
        self._calls["open"] += writes
        _show_lines(opened, writes)
        return opened

    def _open_live(self, file: Any, mode: str, options: dict[str, Any]) -> Any:
        path = self._path(file)
        if path is None:
            return _open(file, mode, **options)
        if set(mode) & set("ax+"):
            self._cross("size", lambda: virtual.size_of(path))
        try:
            opened = _open(file, mode, **options)
        except FileExistsError:
            if not self._redoing or "x" not in mode:
                raise
            opened = _open(file, mode.replace("x", "w"), **options)
        _show_lines(opened, True)
        if "a" in mode:
            virtual.mark(opened.fileno())
        return opened

    def _recorded_size(self, path: str) -> int | None:
        """None where it is not on the record: another thread asks, or a library in a region."""
        computed = []

        def compute() -> int:
            computed.append(True)
            return 0

        size = self._cross("size", compute)
        return None if computed else size

    # --- functions that change the file system ----------------------------------------------------

    def _replaced_changes(self) -> list[tuple[Any, Any]]:
        return [
            (getattr(module, name), self._change(name, getattr(module, name)))
            for module, names in _CHANGES
            for name in names
            if hasattr(module, name)
        ]

    def _change(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if self._is(_MUTED):
                paths = _paths(name, args, kwargs)
                if not paths or self._path(paths[-1]) is None:
                    with self.real():  # with all that it calls
                        return original(*args, **kwargs)
                return self._muted_change(name, [_abspath(os.fsdecode(path)) for path in paths], args, kwargs)
            if self._redoing and self._is(_LIVE):
                return self._changed_again(name, original, args, kwargs)
            return original(*args, **kwargs)

        return function

    def _muted_change(self, name: str, paths: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, target = paths[0], paths[-1]
        if name == "mkdir":
            # Missing here, where it was there for the failed rank: harmless, and what follows may need it.
            if not _isdir(source):
                _mkdir(*args, **kwargs)
                self._made.append(source)
            return None
        self._calls[name] += 1
        if name in (*_REMOVE, *_MOVE):
            self._unmake(source, target)
        if name in _REMOVE:
            self._files.remove(source)
        elif name == "truncate":
            self._files.truncate(source, args[1])
        elif name in _MOVE or name in _COPY:
            if name in ("move", "copy", "copy2") and _isdir(target):
                target = os.path.join(target, os.path.basename(source))
            if name in _MOVE:
                if source in self._temporary:
                    _unlink(source)
                self._files.move(source, target)
            elif name != "copytree":
                self._files.copy(source, target)
            return target if name in (*_COPY, "move") else None
        return None

    def _unmake(self, source: str, target: str) -> None:
        """A directory that only the fast-forward has made goes, for good or elsewhere."""
        for made in reversed([path for path in self._made if path == source or path.startswith(source + os.sep)]):
            self._made.remove(made)
            with contextlib.suppress(OSError):  # something real is in it
                _rmdir(made)
                if made == source != target and not _isdir(target):
                    _mkdir(target)

    def _changed_again(
        self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The failed rank may have done it already."""
        try:
            return original(*args, **kwargs)
        except FileNotFoundError:
            target = _paths(name, args, kwargs)[-1]
            if name in _REMOVE:
                return None
            if name in _MOVE and os.path.lexists(target):
                return target if name == "move" else None
            raise
        except FileExistsError:
            if name in _MAKE:
                return None
            raise

    def _patch_accessor(self, live: bool) -> None:
        accessor = sys.modules["pathlib"]._NormalAccessor
        self._patches.put(accessor, "open", staticmethod(self._replaced_open()))
        for name in ("chmod", "link", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink", "touch", "utime"):
            if not live and name in accessor.__dict__ and hasattr(os, name):
                self._patches.put(accessor, name, staticmethod(self._change(name, getattr(os, name))))

    def _noting_temporary(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What tempfile makes in the fast-forward is its own, and real."""

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if self._is(_MUTED):
                self._temporary.append(_abspath(os.fsdecode(made[1] if isinstance(made, tuple) else made)))
            return made

        return make

    # --- what libraries save ----------------------------------------------------------------------

    def _replaced_saves(self, module: ModuleType) -> list[tuple[Any, Any]]:
        place = module.__name__
        found = [
            (name, getattr(module, name, None)) for name in (*_SAVES.get(place, ()), *_COLLECTIVE_SAVES.get(place, ()))
        ]
        return [
            (
                original,
                self._save(place, name, original) if place in _SAVES else self._collective_save(place, name, original),
            )
            for name, original in found
            if original is not None
        ]

    def _save(self, place: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        position, named = _SAVES[place][name]

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            target = args[position] if len(args) > position else kwargs.get(named)
            # Into an object (a BytesIO, an open file) it runs in the fast-forward, too: the script goes on with that.
            if self._is(_MUTED) and isinstance(target, (str, bytes, os.PathLike)):
                path = self._path(target)
                if path is not None:
                    self._calls[f"{place}.{name}"] += 1
                    self._files.remove(path)
                    return None
            with self._saving():
                return original(*args, **kwargs)

        return function

    def _collective_save(self, place: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if self._is(_MUTED):
                self._calls[f"{place}.{name}"] += 1
                if not name.startswith("async"):
                    return None
                done: Future[None] = Future()
                done.set_result(None)
                return done
            with self._saving():
                return original(*args, **kwargs)

        return function

    def _saving(self) -> contextlib.AbstractContextManager[Any]:
        return self._aside() if self._is(_LIVE) else contextlib.nullcontext()

    # --- TensorBoard ------------------------------------------------------------------------------

    def _replace_event_writer(self, module: ModuleType) -> None:
        """Its file is named after time, host and process; a newcomer goes on in the one of the failed rank."""
        writer: Any = module.EventFileWriter
        original = writer.__init__

        @functools.wraps(original)
        def initialize(this: Any, *args: Any, **kwargs: Any) -> None:
            if self._state == _OFF or os.getpid() != self._pid:
                original(this, *args, **kwargs)
                return
            now, host, pid = self._cross("stamp", lambda: (_clock(), socket.gethostname(), os.getpid()))
            before = {name: getattr(module, name) for name in ("time", "socket", "os")}
            module.time = _Instead(before["time"], time=lambda: now)  # type: ignore[attr-defined]
            module.socket = _Instead(before["socket"], gethostname=lambda: host)  # type: ignore[attr-defined]
            module.os = _Instead(before["os"], getpid=lambda: pid)  # type: ignore[attr-defined]
            try:
                original(this, *args, **kwargs)
            finally:
                for name, value in before.items():
                    setattr(module, name, value)
            self._event_writers.add(this)

        self._patches.put(writer, "__init__", initialize)

    def _replace_summary_writer(self, module: ModuleType) -> None:
        """Its directory, where the script names none, is named after time and host."""
        writer: Any = module.SummaryWriter
        original = writer.__init__

        @functools.wraps(original)
        def initialize(this: Any, log_dir: Any = None, comment: str = "", *args: Any, **kwargs: Any) -> None:
            if not log_dir and self._state != _OFF:
                log_dir = self._cross("place", lambda: f"runs/{_now():%b%d_%H-%M-%S}_{socket.gethostname()}{comment}")
            original(this, log_dir, comment, *args, **kwargs)

        self._patches.put(writer, "__init__", initialize)


class _Heard:
    """Lines that were muted, of both streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lines = 0
        self.last: deque[bytes] = deque(maxlen=_LAST)

    def hear(self, lines: list[bytes]) -> None:
        with self._lock:
            self.lines += len(lines)
            # As a terminal shows them in the end: a progress bar overwrites itself.
            self.last.extend(line.rstrip(b"\r").rpartition(b"\r")[2][:_LONGEST] for line in lines[-_LAST:])


class _Ear:
    """Counts what is written to a stream. The stream stays the same object, so whoever keeps it is muted and unmuted
    with it."""

    def __init__(self, stream: Any, heard: _Heard) -> None:
        self._stream = stream
        self._heard = heard
        self._below = getattr(stream, "buffer", stream)
        self._write = self._below.write
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._rest = bytearray()
        """the unfinished line"""

    def mute(self) -> None:
        self.flush()
        self._below.write = self._hear

    def unmute(self) -> None:
        """What is unfinished comes out now, and its rest when the script writes it."""
        self.flush()
        del self._below.write
        if self._rest:
            rest = bytes(self._rest)
            self._write(rest if self._below is not self._stream else rest.decode())
            self._stream.flush()

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def _hear(self, data: Any) -> int:
        if os.getpid() != self._pid or threading.current_thread().name.startswith(_OUR_THREADS):
            return int(self._write(data))
        text = data.encode(errors="surrogateescape") if isinstance(data, str) else bytes(data)
        with self._lock:
            self._rest += text
            if b"\n" in text:
                *lines, rest = bytes(self._rest).split(b"\n")
                self._rest = bytearray(rest)
                self._heard.hear(lines)
        return len(data)


class _Instead:
    """A module with some of its functions replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _show_lines(file: Any, writes: bool) -> None:
    """A rank that is killed shall lose no complete line."""
    if writes and isinstance(file, io.TextIOWrapper):
        file.reconfigure(line_buffering=True)


def _paths(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The paths among the arguments: one or two, the one that is made last."""
    count = 2 if name in (*_MOVE, *_COPY, "symlink", "link", "copymode", "copystat") else 1
    named = [kwargs[key] for key in ("path", "src", "old", "name", "dst", "new") if key in kwargs]
    return [*args[:count], *named][:count]

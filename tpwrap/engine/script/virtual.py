"""Files that a newcomer's fast-forward writes: they are in memory, and when it is live they go on in the real ones.

A file in memory is a real one (memfd), so everything about the objects that the script holds is Python's own. Going
live means to put the file on disk behind the descriptor that an object already has.

Where the real file goes on: the failed rank has written all that the fast-forward has, and maybe more. Text is found by
the number of lines, since a line may hold a time of day; anything else by the number of bytes. What the failed rank had
not yet brought to the disk comes from memory.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import struct
import weakref
from typing import IO, Any, NamedTuple

MOST = 1 << 30
"""bytes that all files in memory may have together"""
KEPT = 16 << 20
"""bytes of a closed file that are kept to be read again"""
_CHUNK = 1 << 20
_NUMBERS = re.compile(rb"[0-9]+")
_LOCK = struct.Struct("hhqqi4x")
_LOCK_AT = 1 << 62
"""a byte that no file has"""

# As they are without us: other parts of the engine observe these, too.
_open, _stat, _exists, _makedirs = io.open, os.stat, os.path.exists, os.makedirs


class OutputsError(RuntimeError):
    """The fast-forward cannot follow what the script does with its files."""


class Continuation(NamedTuple):
    """How a file on disk becomes what it was at the entry: cut it to `keep` bytes, then write `add`."""

    keep: int
    add: bytes


def by_lines(disk: bytes, muted: bytes) -> Continuation:
    """For text: as many complete lines as `muted` has, and then its unfinished line."""
    lines = muted.count(b"\n")
    here = disk.count(b"\n")
    if here < lines:
        return Continuation(disk.rfind(b"\n") + 1, muted[_end_of_line(muted, here) :])
    return Continuation(_end_of_line(disk, lines), muted[muted.rfind(b"\n") + 1 :])


def by_bytes(disk: bytes, muted: bytes) -> Continuation:
    keep = min(len(disk), len(muted))
    return Continuation(keep, muted[keep:])


def alike(disk: bytes, muted: bytes) -> bool:
    """Whether the complete lines that both have are the same but for numbers."""
    lines = min(disk.count(b"\n"), muted.count(b"\n"))
    ours, theirs = (text[: _end_of_line(text, lines)] for text in (muted, disk))
    return ours == theirs or _NUMBERS.sub(b"0", ours) == _NUMBERS.sub(b"0", theirs)


def _end_of_line(text: bytes, number: int) -> int:
    """The offset after the first `number` lines."""
    at = 0
    for _ in range(number):
        at = text.index(b"\n", at) + 1
    return at


class _Handle:
    """A file object that the script has, or had. mode: without "b" and "t"."""

    def __init__(self, file: IO[Any], mode: str) -> None:
        raw: Any = getattr(file, "buffer", file)
        raw = getattr(raw, "raw", raw)
        self._file = weakref.ref(file)
        self._raw = weakref.ref(raw)
        self.mode = mode
        self.writes = mode != "r"

    @property
    def fd(self) -> int:
        """-1 once the object is closed."""
        raw = self._raw()
        return -1 if raw is None or raw.closed else raw.fileno()

    def flush(self) -> None:
        file = self._file()
        if file is not None and not file.closed:
            file.flush()

    def attach(self, path: str, at_end: bool) -> None:
        """Put the file on disk behind the object."""
        access = os.O_RDWR if "+" in self.mode else os.O_WRONLY if self.writes else os.O_RDONLY
        append = os.O_APPEND if "a" in self.mode else 0
        at = os.lseek(self.fd, 0, os.SEEK_CUR)
        real = os.open(path, access | append | os.O_CLOEXEC)
        try:
            os.dup2(real, self.fd, inheritable=False)
        finally:
            os.close(real)
        os.lseek(self.fd, 0 if at_end else at, os.SEEK_END if at_end else os.SEEK_SET)
        if append:
            mark(self.fd)


class _Content:
    """What is in one file, as far as the fast-forward knows it."""

    def __init__(self) -> None:
        self.fd = _memory()
        self.anchor = 0
        """up to here the file on disk was what the failed rank said it was"""
        self.mode = "w"
        """how it was last opened for writing"""
        self.lines = False
        """it is text that can be found by lines"""
        self.settled = False
        """it was put in its place by renaming: the failed rank did not go on in it"""
        self.shared = False
        """others write to it, too"""
        self.holes = False
        """it cannot be read from its start: too much for our memory"""
        self.unknown = False
        """even what was written since `anchor` is not kept"""
        self.handles: list[_Handle] = []

    def __del__(self) -> None:
        os.close(self.fd)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, start: int) -> bytes:
        return _read(self.fd, start, self.size)

    def open_handles(self) -> list[_Handle]:
        self.handles = [handle for handle in self.handles if handle.fd >= 0]
        return self.handles

    def extend(self, path: str, size: int) -> None:
        """Make it `size` bytes long; what is new in it comes from the file on disk."""
        at = self.size
        os.ftruncate(self.fd, size)
        if size - at > KEPT:
            self.holes = True
        elif at < size:
            _copy_range(path, self.fd, at, size)

    def shrink(self) -> int:
        """Keep only what is needed if it is closed and large. Returns the bytes of memory it takes."""
        taken = _memory_of(self.fd)
        if taken <= KEPT or self.open_handles():
            return taken
        fd, since = _memory(), self.size - self.anchor
        self.holes, self.unknown = True, since > KEPT
        if not self.unknown:
            os.ftruncate(fd, self.anchor)
            os.pwrite(fd, self.read(self.anchor), self.anchor)
        os.close(self.fd)
        self.fd = fd
        return _memory_of(fd)


class VirtualFiles:
    """All files that the fast-forward has written, by absolute path."""

    def __init__(self) -> None:
        self._contents: dict[str, _Content] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._contents

    def open(self, path: str, name: Any, mode: str, size: int | None, options: dict[str, Any]) -> IO[Any]:
        """As io.open(name, mode, **options), in memory. size: of the file when the failed rank opened it, -1 if it was
        not there (only for the modes "a", "x" and "r+"); None where nobody knows: then it is as the fast-forward has
        it, or else as it is on disk.

        Raises what open would raise, and OutputsError for what is not kept.
        """
        kind = mode.replace("b", "").replace("t", "").replace("U", "")
        content = self._contents.get(path)
        if size is None and content is None:
            size = size_of(path) if kind != "x" else -1
        if "r" in kind and content is None and size == -1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if "x" in kind and (content is not None if size is None else size >= 0):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not _exists(os.path.dirname(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._make_room()
        content = content or _Content()
        if content.holes and (kind[0] == "r" or kind == "a+"):
            raise OutputsError(f"{path} is read again, and it had more than {KEPT >> 20} MB")
        source = content.fd
        if kind[0] == "a" and size is not None:
            _go_on_later(path, content, max(size, 0))
        elif kind == "r+" and size is not None and path not in self._contents:
            content.extend(path, size)
            content.anchor = size
        elif kind[0] in "wx":
            content.anchor, content.shared, content.holes, content.unknown = 0, False, False, False

        def opener(_: str, flags: int) -> int:
            return os.open(f"/proc/self/fd/{source}", flags & ~(os.O_EXCL | os.O_CREAT))

        file: IO[Any] = _open(name, mode, opener=opener, **options)
        self._contents[path] = content
        if kind != "r":
            encoding = getattr(file, "encoding", None)
            content.mode = kind[0]
            content.lines = encoding is not None and "\n".encode(encoding) == b"\n"
            content.settled = False
        content.handles.append(_Handle(file, kind))
        return file

    def remove(self, path: str) -> None:
        """The file, or everything below the directory."""
        for known in self._at_or_below(path):
            del self._contents[known]

    def move(self, source: str, target: str) -> None:
        moved = {target + known[len(source) :]: self._contents.pop(known) for known in self._at_or_below(source)}
        self.remove(target)
        for content in moved.values():
            content.settled = True
        self._contents |= moved

    def truncate(self, path: str, size: int) -> None:
        if path in self._contents:
            os.ftruncate(self._contents[path].fd, size)

    def copy(self, source: str, target: str) -> None:
        self._contents.pop(target, None)
        original = self._contents.get(source)
        if original is None:
            return
        content = _Content()
        for handle in original.open_handles():
            handle.flush()
        _write(content.fd, original.read(0))
        content.settled = True
        self._contents[target] = content

    def go_live(self) -> list[str]:
        """Go on in the files on disk. Returns those that could not be put back to what they were at the entry, because
        others write to them, too: lines between the entry and the failure can be in them twice."""
        doubts = [path for path, content in self._contents.items() if not _go_on(path, content)]
        self._contents.clear()
        return doubts

    def _at_or_below(self, path: str) -> list[str]:
        return [known for known in self._contents if known == path or known.startswith(path + os.sep)]

    def _make_room(self) -> None:
        if sum(content.shrink() for content in self._contents.values()) > MOST:
            raise OutputsError(f"the files that the script keeps open have more than {MOST >> 20} MB")


def _go_on_later(path: str, content: _Content, size: int) -> None:
    """It is opened for appending, when it had `size` bytes."""
    for handle in content.open_handles():
        handle.flush()
    written = content.read(content.anchor)
    if content.anchor < size and content.size > 0 and not content.unknown:
        # Between the last opening and this one, has the file grown by what we know of, and by nothing else?
        grown = _read_path(path, content.anchor, size)
        same = grown.count(b"\n") == written.count(b"\n") if content.lines else len(grown) == len(written)
        content.shared = content.shared or not same
    content.extend(path, size)
    content.anchor = size
    content.unknown = False


def _go_on(path: str, content: _Content) -> bool:
    handles = content.open_handles()
    writers = [handle for handle in handles if handle.writes]
    for handle in writers:
        handle.flush()
    if not writers and (content.settled or content.unknown or not _exists(path)):
        return True
    ends = {handle.fd: os.lseek(handle.fd, 0, os.SEEK_CUR) == content.size for handle in writers}
    certain = _put_back(path, content, bool(writers), all(ends.values()))
    for handle in handles:
        handle.attach(path, ends.get(handle.fd, False))
    return certain


def _put_back(path: str, content: _Content, is_open: bool, at_end: bool) -> bool:
    """Make the file on disk what it was at the entry. False where that cannot be told."""
    _makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if is_open else 0), 0o666)
    try:
        start = content.anchor
        disk, muted = _read(fd, start, os.fstat(fd).st_size), content.read(start)
        lines = content.lines and at_end
        if content.mode == "a" and (content.shared or is_marked(fd) or (lines and not alike(disk, muted))):
            return not disk
        keep, add = by_lines(disk, muted) if lines else by_bytes(disk, muted)
        if not is_open:
            # It was complete on disk. Only what came after it may go.
            if content.mode != "a" and not (alike(disk, muted) if lines else disk.startswith(muted)):
                return True
            if not disk.startswith(add, keep):
                return True
            keep, add = keep + len(add), b""
        os.ftruncate(fd, start + keep)
        os.lseek(fd, 0, os.SEEK_END)
        _write(fd, add)
        return True
    finally:
        os.close(fd)


def mark(fd: int) -> None:
    """Let others see that this process has the file open for appending. (A lock of a byte that does not exist: it
    hinders nobody, and is gone with the process.)"""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LOCK_AT, 1, 0))
    except OSError:
        pass  # held by another one, which is just as well, or this file system has no locks


def is_marked(fd: int) -> bool:
    """Whether another process has marked this file."""
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LOCK_AT, 1, 0))
    except OSError:
        return False
    return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)


def size_of(path: str) -> int:
    """-1 where there is no file."""
    try:
        return _stat(path).st_size
    except OSError:
        return -1


def _memory() -> int:
    return os.memfd_create("torchpass-muted", os.MFD_CLOEXEC)


def _memory_of(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def _read_path(path: str, start: int, end: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return _read(fd, start, end)
    finally:
        os.close(fd)


def _read(fd: int, start: int, end: int) -> bytes:
    parts = []
    while start < end and (part := os.pread(fd, min(_CHUNK, end - start), start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _copy_range(path: str, fd: int, start: int, end: int) -> None:
    while start < end and (part := _read_path(path, start, min(end, start + _CHUNK))):
        os.pwrite(fd, part, start)
        start += len(part)

"""Files that the script reads, as they were when the failed rank read them.

A newcomer runs the script again, at a time when the job may have written such files itself: the snapshot that the
script resumes from, if there is one. So a live rank records how each opening of a file for reading ended (there was
none; its size and time), and a newcomer finds none where there was none, and does not read what has changed since.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

from tpwrap.engine.script.boundary import Boundary, Mode

_stat, _open = os.stat, io.open
_LIBRARIES = tuple({os.path.realpath(place) + os.sep for place in (sys.prefix, sys.base_prefix)})
_SOURCES = (".py", ".pyc", ".so")
_MOST = 10_000
"""files; the names of more would make the tape long"""

_SMALL = 4 << 20
"""bytes; up to here files are told apart by what they hold, and not by when they were written: a newcomer that starts
over writes again what the script has prepared"""

Outcome = tuple[int, int, int]
"""error number, or 0 and size in bytes, and a digest or the time of the last change in ns"""


class Readings:
    """What was read, by path: the outcomes that differed from the one before."""

    def __init__(self, boundary: Boundary, fail: Callable[[str], NoReturn]) -> None:
        self._boundary = boundary
        self._fail = fail
        self._last: dict[str, Outcome] = {}
        self._recorded: dict[str, list[Outcome]] = {}

    def load(self, recorded: list[Any]) -> None:
        """A newcomer's: the openings of the failed rank, in order."""
        self._recorded = {}
        for path, outcome in recorded:
            self._recorded.setdefault(path, []).append(tuple(outcome))

    def opening(self, path: str) -> None:
        """The script is about to open a file for reading. Raises OSError where the failed rank found none."""
        if not self._boundary.outside or path.startswith(_LIBRARIES) or path.endswith(_SOURCES):
            return
        if self._boundary.mode is Mode.LIVE:
            self._record(path)
            return
        known = self._recorded.get(path)
        if known is None:
            return
        now = _outcome(path)
        if known[0][0] and now != known[0] and (len(known) == 1 or now not in known[1:]):
            raise OSError(known[0][0], os.strerror(known[0][0]), path)
        if now not in known or sum(not outcome[0] for outcome in known) > 1:
            self._fail(f"{path}, which the failed rank has read, was changed since")

    def _record(self, path: str) -> None:
        outcome = _outcome(path)
        if self._last.get(path) != outcome and len(self._last) < _MOST:
            self._last[path] = outcome
            self._boundary.tape.aside("file", (path, outcome))


def _outcome(path: str) -> Outcome:
    try:
        found = _stat(path)
    except OSError as error:
        return (error.errno or 0, 0, 0)
    if found.st_size <= _SMALL and stat.S_ISREG(found.st_mode):
        with contextlib.suppress(OSError), _open(path, "rb") as file:
            return (0, found.st_size, zlib.crc32(file.read()))
    return (0, found.st_size, found.st_mtime_ns)

"""Lines that a newcomer prints again: the failed rank had printed them between the newcomer's entry and its own end.

They are the last ones in the rank's log, and the first ones that the newcomer prints. So they are dropped as they
come. The two streams of a worker may meet in another order than before. A line that is not expected ends the dropping:
a wrong guess shows a line twice, and never loses one.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_CLOCK = re.compile(
    rb"\d{1,4}[-/]\d{1,2}[-/]\d{1,4}"  # a date
    rb"|\d{1,2}:\d\d(:\d\d)?([.,]\d+)?"  # a time of day
    rb"|\[[\d:]+<[^]]*\]"  # what a progress bar says about its speed
)


def essence(line: bytes) -> bytes:
    """What is the same when a line is printed again: all but the time of day, and what was overwritten (with \\r)."""
    return _CLOCK.sub(b"@", line.rstrip(b"\r").rpartition(b"\r")[2])


class Repeats:
    """The lines to expect, without their ends. Shared by the streams of one worker."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._left = Counter(essence(line) for line in lines)

    @property
    def expected(self) -> bool:
        """Whether any are still to come."""
        return bool(self._left)

    def drop(self, line: bytes) -> bool:
        """Whether this line is one of them. If not, there are no more."""
        what = essence(line)
        if self._left[what] == 0:
            self._left.clear()
            return False
        self._left[what] -= 1
        self._left += Counter()  # forgets what is used up
        return True

    def stop(self) -> None:
        self._left.clear()


def start_of(log: Sequence[bytes], lines: int, last: Sequence[bytes]) -> int:
    """Where in `log` the repeats begin, for a newcomer that has muted `lines` lines, and these at last.

    Normally that is line number `lines`; it is later when the log has more, of libraries or of the engine, that no
    script has printed.
    """
    wanted = Counter(map(essence, last))
    for start in range(max(lines, len(last)), len(log) + 1):
        if Counter(map(essence, log[start - len(last) : start])) == wanted:
            return start
    return lines


def take_from(log: Path, lines: int, last: Sequence[bytes]) -> list[bytes]:
    """The lines in this log file that a newcomer will print again.

    A last line without an end was cut when the rank was killed; it is taken out of the file, since the newcomer prints
    it as a whole. Where the file is missing or has not so many lines (it was written on another disk), nothing is
    expected. Raises OSError.
    """
    skipped = max(0, lines - len(last))
    try:
        file = log.open("r+b")
    except FileNotFoundError:
        return []
    with file:
        before = sum(1 for _ in itertools.islice(file, skipped))
        rest = file.readlines()
        if rest and not rest[-1].endswith(b"\n"):
            cut = rest.pop()
            if before + len(rest) >= lines:
                file.truncate(os.fstat(file.fileno()).st_size - len(cut))
            else:
                file.write(b"\n")
    rest = [line[:-1] for line in rest]
    return rest[start_of(rest, lines - skipped, last) :]

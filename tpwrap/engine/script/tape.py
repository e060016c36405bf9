"""The tape: everything that came out of tensors (or from outside) into the script's Python, in order.

A rank records; a newcomer that runs the same script with stubbed tensors is answered from the record, so that its loops
take the same branches and its variables the same values. Entries carry their kind and the line that asked: a newcomer
that asks for something else than what was recorded has diverged, and says so instead of going on with a wrong answer.

The record leaves the process in *chunks* (one a publication). Chunks are gathered in segments; a segment that is full
never changes again and is kept by the buddies for ever, the open one travels in every sidecar.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tpwrap.engine import encoding

SEGMENT = 8 << 10
"""bytes from which on a segment is closed"""
LARGEST = 4 << 20
"""bytes of one value; a larger one is left out, and a newcomer cannot pass the place"""


class Diverged(RuntimeError):
    """The newcomer's script asked for something else than the failed rank's."""


class End(NamedTuple):
    """Where a tape ends at a publication."""

    segments: int
    """closed ones, kept by the buddies"""
    open: bytes
    """chunks after those, each with its length in front"""
    entries: int
    """in all"""


Entry = tuple[str, int, Any]
"""kind, line, value"""


class Tape:
    """One rank's tape: recorded by it, or played to a newcomer, which then goes on recording."""

    def __init__(self) -> None:
        self.count = 0
        """entries recorded, or answered"""
        self.pending: list[Entry] = []
        """not yet published"""
        self.bytes = 0
        """published in all"""
        self._closed = 0
        self._open = bytearray()
        self._play: list[Entry] = []
        self.asides: list[tuple[str, Any]] = []
        """of the record that is played"""

    # --- recording --------------------------------------------------------------------------------

    def record(self, kind: str, line: int, value: Any) -> None:
        """Raises TypeError where the value cannot be moved."""
        self.pending.append((kind, line, _kept(value)))
        self.count += 1

    def aside(self, kind: str, value: Any) -> None:
        """Record something that nobody asks for at its place (see `asides`)."""
        self.pending.append((kind, -1, value))

    def seal(self) -> tuple[End, bytes | None]:
        """Take what is pending into the record. Returns where it ends now, and a segment if one was closed."""
        if self.pending:
            chunk = encoding.encode(self.pending)
            self.pending = []
            self._open += len(chunk).to_bytes(4, "little") + chunk
            self.bytes += len(chunk)
        closed = None
        if len(self._open) >= SEGMENT:
            closed = bytes(self._open)
            self._open.clear()
            self._closed += 1
        return End(self._closed, bytes(self._open), self.count), closed

    # --- playing ----------------------------------------------------------------------------------

    def load(self, segments: list[bytes], end: End) -> None:
        """Play this record, from where we are (what has been answered is the same in a longer record)."""
        everything = [entry for blob in (*segments, end.open) for entry in _entries(blob)]
        entries = [entry for entry in everything if entry[1] >= 0]
        self.asides = [(kind, value) for kind, line, value in everything if line < 0]
        if len(entries) != end.entries:
            raise Diverged(f"the tape has {len(entries)} entries where {end.entries} were recorded")
        self._play = entries
        self._closed = end.segments
        self._open = bytearray(end.open)
        beyond = max(0, self.count - end.entries)
        asked = [i for i, (_, line, _) in enumerate(self.pending) if line >= 0]
        self.pending = self.pending[asked[len(asked) - beyond] :] if beyond else []

    @property
    def left(self) -> int:
        """Recorded entries that were not asked for yet."""
        return len(self._play) - self.count

    def play(self, kind: str, line: int) -> Any:
        """The recorded answer. Raises Diverged."""
        if self.count >= len(self._play):
            raise Diverged(f"line {line} asks for {KINDS[kind]} after the end of what was recorded")
        recorded, at, value = self._play[self.count]
        if (recorded, at) != (kind, line):
            raise Diverged(
                f"line {line} asks for {KINDS[kind]}, but the failed rank asked for {KINDS[recorded]} at line {at}"
            )
        self.count += 1
        return value

    def forget(self) -> None:
        """All was answered."""
        self._play, self.asides = [], []

    def answered(self, kind: str, line: int, value: Any) -> None:
        """An entry that was answered without the record, after its end: it belongs to the record from now on."""
        self.pending.append((kind, line, _kept(value)))
        self.count += 1

    def answers(self) -> list[Entry]:
        """What was recorded, or answered, since the last publication."""
        return [entry for entry in self.pending if entry[1] >= 0]


def _kept(value: Any) -> Any:
    """The value as it is now: the script may go on to change it."""
    if type(value) in _UNCHANGEABLE:
        return value
    data = encoding.encode(value)
    if len(data) > LARGEST + _AROUND:
        raise TypeError(f"it takes {len(data)} bytes")
    return encoding.decode(data)


_AROUND = 256
"""bytes that an encoding adds to a value's own"""
_UNCHANGEABLE = frozenset({type(None), bool, int, float, str, bytes})
KINDS = {
    "v": "a tensor's value",
    "b": "a batch",
    "m": "a model's output",
    "o": "objects of other ranks",
    "f": "the state of a file",
    "t": "the time",
    "u": "a random identifier",
    "s": "whether the scaler let the update through",
    "a": "what a library found out",
    "g": "a norm of the gradients",
}
"""what the kinds of entries are, in the words of an error"""


def _entries(blob: bytes) -> list[Entry]:
    found: list[Entry] = []
    at = 0
    while at < len(blob):
        size = int.from_bytes(blob[at : at + 4], "little")
        found += encoding.decode(blob[at + 4 : at + 4 + size])
        at += 4 + size
    return found

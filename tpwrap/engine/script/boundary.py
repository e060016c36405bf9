"""The boundary between the script's Python and what is heavy: data, models, optimizers, other ranks.

Calls across it are *regions*. Inside a region nothing is recorded; what comes out of one is. In a newcomer's fast
forward, regions do not run: their results are stubs, and whatever the script reads from a stub is answered from the
tape. Only the thread that runs the script is observed.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from tpwrap.engine import randomness
from tpwrap.engine.script.files import is_script_file
from tpwrap.engine.script.tape import LARGEST, Diverged, Tape


class Mode(enum.Enum):
    OFF = "off"
    """nothing is observed: the script has asked for the two-line API, or has finished"""
    LIVE = "live"
    """values are recorded"""
    FORWARD = "forward"
    """a newcomer on its way: values are answered from the tape"""
    WINDOW = "window"
    """a newcomer between the last backward before its entry and the end of that update: no longer on the tape"""


_clock = time.perf_counter  # as it is now: the script's is going to be observed
_OBSERVED = (Mode.LIVE, Mode.WINDOW)


Window = Callable[[str, int, Callable[[], Any], tuple[Any, ...]], Any]


class Boundary:
    """tape: the record. fail: called with the reason when a newcomer cannot go on; never returns.
    window: answers a crossing in Mode.WINDOW: (kind, line, compute, subjects) -> value."""

    def __init__(self, tape: Tape, fail: Callable[[str], NoReturn]) -> None:
        self.tape = tape
        self.mode = Mode.LIVE
        self.inside = 0
        """regions that the script's thread is in"""
        self.regions = 0
        """regions passed, including the one that runs"""
        self.begin: Callable[[], None] | None = None
        """called at the first region of the training"""
        self.next_region: Callable[[], None] | None = None
        """called at the next region"""
        self.window: Window = lambda kind, line, compute, subjects: compute()
        self.reduced: Callable[[Any, bool], None] = lambda tensors, equal: None
        """told in Mode.WINDOW of tensors that a collective has written: equal on all ranks, or not"""
        self.observer: Callable[[str, str, tuple[Any, ...]], None] | None = None
        """told in Mode.LIVE of each value that comes out: kind, where, subjects"""
        self.too_large: dict[str, int] = {}
        """places whose values were not recorded: bytes"""
        self.unmovable: dict[str, str] = {}
        """places whose values cannot be recorded: why"""
        self.outside_seconds = 0.0
        """that the script's own code took between regions: about what a newcomer's way takes"""
        self._left = _clock()
        self._fail = fail
        self._thread = threading.get_ident()
        os.register_at_fork(after_in_child=self._in_child)
        self._drawn = _Draws()

    def _in_child(self) -> None:
        """A fork (a loader's worker) is not the script."""
        self.mode = Mode.OFF

    @property
    def outside(self) -> bool:
        """Whether this is the script itself: its thread, in no region, observed."""
        return self.inside == 0 and self.mode is not Mode.OFF and threading.get_ident() == self._thread

    # --- values that come out ---------------------------------------------------------------------

    def cross(
        self, kind: str, compute: Callable[[], Any], line: int | None = None, subjects: tuple[Any, ...] = ()
    ) -> Any:
        """The value of `compute()`, recorded, or the recorded one. Call it only where `outside`. subjects: what it is
        computed from."""
        if line is None:
            line = sys._getframe(2).f_lineno

        def computed() -> Any:
            with self.aside():
                return compute()

        if self.mode is Mode.LIVE:
            if self.observer is not None:
                self.observer(kind, where(sys._getframe(2)), subjects)
            try:
                value = computed()
            except Exception as error:
                self.tape.record(kind, line, _Raised.describe(error))
                raise
            self._record(kind, line, value)
            return value
        try:
            if self.mode is Mode.WINDOW and self.tape.left <= 0:
                recorded = self._answer(kind, line, computed, subjects)
            else:
                recorded = self.tape.play(kind, line)
        except Diverged as error:
            self.fail(str(error))
        if _Raised.is_one(recorded):
            raised = _Raised.error(recorded)
            if raised is None:
                self.fail(f"line {line} {recorded[2]}")
            raise raised
        return recorded

    def _record(self, kind: str, line: int, value: Any) -> None:
        size = getattr(value, "nbytes", 0)
        if size > LARGEST:
            self.too_large[where(sys._getframe(2)) or f"line {line}"] = size
            reason = f"takes {size} bytes out of a tensor, which is too much to be recorded"
            self.tape.record(kind, line, _Raised.left_out(reason))
            return
        try:
            with self.aside():  # to copy a tensor is to read it
                self.tape.record(kind, line, value)
        except (TypeError, ValueError) as error:
            self.unmovable[where(sys._getframe(2)) or f"line {line}"] = str(error)
            self.tape.record(kind, line, _Raised.left_out(f"gets what cannot be moved: {error}"))

    def _answer(self, kind: str, line: int, compute: Callable[[], Any], subjects: tuple[Any, ...]) -> Any:
        try:
            recorded = self.window(kind, line, compute, subjects)
        except Diverged:
            raise
        except Exception as error:
            recorded = _Raised.describe(error)
        with self.aside():
            self.tape.answered(kind, line, recorded)
        return recorded

    def fail(self, reason: str) -> NoReturn:
        """This newcomer cannot go on."""
        self._fail(reason)

    def quiet(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose inside is not the script's: nothing that it reads is recorded. Unlike a region it runs in a
        newcomer, too."""

        @functools.wraps(function)
        def quiet(*args: Any, **kwargs: Any) -> Any:
            with self.aside():
                return function(*args, **kwargs)

        return quiet

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is done meanwhile is not the script's."""
        if not self.outside:
            yield
            return
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    # --- regions ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """A region begins."""
        self.inside += 1  # first: what we ourselves read from tensors is not the script's
        self.outside_seconds += _clock() - self._left
        if self.begin is not None:
            begin, self.begin = self.begin, None
            begin()
        if self.next_region is not None:
            pending, self.next_region = self.next_region, None
            pending()
        if self.inside > 1:
            return  # within another one
        self.regions += 1
        if self.mode in _OBSERVED:
            drawn = self._drawn.between()
            if drawn is not None:
                self.tape.aside("draws", (self.regions - 1, *drawn))

    def leave(self) -> None:
        """It has ended."""
        self.inside -= 1
        if self.inside:
            return
        if self.mode in _OBSERVED:
            self._drawn.after_region()
        elif self.mode is Mode.FORWARD:
            self._drawn.restore(self.regions)
        self._left = _clock()

    def load_draws(self) -> None:
        """A newcomer: take from the tape where the script itself drew from Python's or NumPy's generators after these
        had moved inside a region, by the number of that region."""
        self._drawn.recorded = {v[0]: (v[1], v[2]) for kind, v in self.tape.asides if kind == "draws"}

    def settle_draws(self) -> None:
        """A newcomer's generators are now those of the failed rank, and others than the tape alone would give."""
        self._drawn.settle()


def where(frame: FrameType | None) -> str:
    """The line of the script that is being executed, "train.py:57"; "" where none is on the stack."""
    while frame is not None and not is_script_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class _Raised:
    """On the tape in the place of a value: a question was answered by an exception, or its answer was left out."""

    _MARK = "\0raised"

    @staticmethod
    def describe(error: Exception) -> tuple[str, str, list[Any]]:
        """One of Python's own exceptions, with plain arguments."""
        name = next(kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
        plain = [one if isinstance(one, (int, str, bytes, type(None))) else str(one) for one in error.args]
        if isinstance(error, OSError) and error.filename is not None:
            plain = [*plain[:2], str(error.filename)]
        return (_Raised._MARK, name, plain)

    @staticmethod
    def left_out(reason: str) -> tuple[str, str, str]:
        return (_Raised._MARK, "", reason)

    @staticmethod
    def is_one(recorded: Any) -> bool:
        return isinstance(recorded, tuple) and len(recorded) == 3 and recorded[0] == _Raised._MARK

    @staticmethod
    def error(recorded: tuple[str, str, Any]) -> Exception | None:
        """The exception; None for what was left out."""
        _, name, arguments = recorded
        if not name:
            return None
        raised: Exception = getattr(builtins, name)(*arguments)
        return raised


class _Draws:
    """Draws by the script itself.

    A newcomer does not run regions, so what these draw from the global generators does not happen there. As long as
    the script itself draws nothing, that does not matter; when it does, its next values depend on the state after the
    region, which is recorded then, and only then.
    """

    def __init__(self) -> None:
        self.recorded: dict[int, tuple[Any, Any]] = {}
        self.drifted = False
        """the generators have moved inside a region since the newcomer's would last have been equal"""
        self._after = self._before = self._now()

    def settle(self) -> None:
        self._after = self._before = self._now()
        self.drifted = True

    def between(self) -> tuple[Any, Any] | None:
        """At the start of a region: the states after the last one, if the script has drawn since and needs them."""
        now, after = self._now(), self._after
        if now != after and self.drifted:
            self.drifted = False
            self._before = now
            return after
        self._before = now
        return None

    def after_region(self) -> None:
        self._after = self._now()
        if self._after != self._before:
            self.drifted = True

    def restore(self, region: int) -> None:
        """A newcomer at the end of a region that it has not run."""
        states = self.recorded.get(region)
        if states is not None:
            randomness.restore_python(states[0])
            randomness.restore_numpy(states[1])

    @staticmethod
    def _now() -> tuple[Any, Any]:
        return randomness.python_state(), randomness.numpy_state()

"""Redo: the second way over a failure. The body of the step runs once more, from its start.

Replay keeps the inputs of a step's collectives; where they do not fit into memory, the survivors' pass is *poisoned*
instead: what it waits for, and whatever it issues from then on, completes at once with an echo of its own data, so that
no exception reaches DDP or FSDP2 (both are left incoherent by one). Nothing of it is applied: at the vote before the
update the pass ends. Then random state, buffers, registered values and scalars are put back to what they were at the
start of the body, and it runs again on new communicators.

Which part of a script may run again is for the script to say (`tp.step`): counters and side effects in it must be
registered or harmless. What it has issued outside is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tpwrap.engine import ddp
from tpwrap.engine.communicators import Aborted

if TYPE_CHECKING:
    from tpwrap.engine.runtime import Runtime

T = TypeVar("T")


class Redo:
    """The bodies of the current step, and whether they are to run again.

    Two forms. A function is called again by us, with the same arguments. A `with` block cannot be: there the iterator
    of batches serves the same batches again, and the loop's body comes round.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.used = False
        """the script has said what may run again"""
        self._capture: Callable[[], Callable[[], None]] = lambda: lambda: None
        self._put_back: Callable[[], None] = lambda: None
        self._groups = 0
        """process groups that there were at the first one"""
        self._calls: list[Callable[[], Any]] = []
        """bodies that were begun since the last commit"""
        self._open = False
        """there was one, of either form"""
        self._inside = False
        self._loop = False
        """it was a `with` block"""
        self._ended = False
        """the poisoned pass is over, and the training thread waits"""

    def of(self, capture: Callable[[], Callable[[], None]]) -> None:
        """capture: notes the present state and returns what puts it back."""
        self._capture = capture

    # --- recovery thread --------------------------------------------------------------------------

    @property
    def possible(self) -> bool:
        """False while the script is between two bodies of one step: it would have to go back; where the pass has made
        a process group: it would make another one, under another name than on the newcomer; and as long as DDP would
        count the poisoned pass and change its buckets."""
        if not self._open:
            return True
        made_none = len(self._runtime.communicators.all) == self._groups
        return (self._inside or self._loop) and made_none and ddp.may_pass_again()

    def poison(self) -> None:
        """Make the pass end that is to be redone, if there is one."""
        runtime = self._runtime
        with runtime.changed:
            if not self._open or runtime.poisoned:
                return
            self._ended = False
            runtime.communicators.poisoned = True
        runtime.journal.poison()
        with runtime.changed:
            runtime.changed.notify_all()

    def await_end_of_pass(self, given_up: Callable[[], bool]) -> None:
        """Until the poisoned pass has come to its end, if there is one. Raises Aborted."""
        runtime = self._runtime
        with runtime.changed:
            runtime.changed.wait_for(lambda: not runtime.poisoned or self._ended or given_up())
        if given_up():
            raise Aborted("the generation was given up before the poisoned pass ended")

    def begin_again(self) -> None:
        """Communicators stand and the journal is live: the body may run once more."""
        runtime = self._runtime
        with runtime.changed:
            if runtime.poisoned:
                runtime.communicators.poisoned = False
                runtime.journal.set_region(True)
            runtime.changed.notify_all()

    # --- training thread --------------------------------------------------------------------------

    def run(self, body: Callable[[], T]) -> T:
        """Call it, and again whenever its pass was poisoned."""
        self._begin(body)
        bodies: list[Callable[[], Any]] = [body]
        while True:
            try:
                for one in bodies:
                    result = one()
                if self._leave():
                    return result  # type: ignore[no-any-return]
            except BaseException:
                if self._leave():
                    raise
            self._go_back()
            bodies = list(self._calls)

    def enter(self) -> None:
        """A `with` block begins."""
        self._loop = True
        self._begin(None)

    def leave(self) -> bool:
        """A `with` block ends. Whether its pass was poisoned; then all is as it was at the first one of the step."""
        if self._leave():
            return False
        self._go_back()
        return True

    def between(self) -> bool:
        """The next batch is asked for. Returns as `leave` does."""
        return self._loop and self._runtime.poisoned and self.leave()

    def committed(self) -> None:
        """The step's update is applied; what follows in the body belongs to the next step, and is never redone."""
        self._open = self._inside = False
        self._calls.clear()
        self._runtime.journal.set_region(False)

    def _begin(self, body: Callable[[], Any] | None) -> None:
        if not self._open:
            self._put_back = self._capture()
            self._groups = len(self._runtime.communicators.all)
        self.used = True
        with self._runtime.changed:
            self._open = self._inside = True
            if body is not None:
                self._calls.append(body)
        self._runtime.journal.set_region(True)

    def _leave(self) -> bool:
        """False: the pass was poisoned."""
        with self._runtime.changed:
            if self._runtime.poisoned:
                return False
            self._inside = False
        if not self._loop:
            self._runtime.journal.set_region(False)
        return True

    def _go_back(self) -> None:
        runtime = self._runtime
        with runtime.changed:
            self._ended = True
            runtime.changed.notify_all()
            runtime.changed.wait_for(lambda: not runtime.poisoned)
            self._inside = True
        self._put_back()

"""Tells Slurm what has happened: a process of its own, so that a slurmctld that does not answer delays nobody.

Started beside the coordinator as `reporter TASK`, TASK being a `Task` in JSON. Reads the lines of events.jsonl on
standard input, and ends some time after it closes: what could not be told by then is printed.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tpwrap.core import events, signals
from tpwrap.slurm import commands, helper, probe
from tpwrap.slurm.chronicle import Chronicle, Drain
from tpwrap.slurm.commands import SlurmError

_RETRY = 2.0
_LINGER = 30.0
"""seconds after the end of the job to go on trying; slurmctld may be restarting"""
_LAST_COMMENT = 3.0
"""seconds that setting dead nodes down waits for the last comment where it must"""
_COMMENT_INTERVAL = 1.0
_ATTEMPTS = 30


class Task(msgspec.Struct, frozen=True):
    """names: the nodes of the job, by number. helper: where the node helper of this node listens."""

    job: str
    """as Slurm's commands take it"""
    names: list[str]
    helper: str


class Reporter:
    def __init__(self, task: Task, say: Callable[[str], None]) -> None:
        self.task = task
        self.say = say
        self.story: Chronicle | None = None
        self.lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.written = ""
        self.drains: list[tuple[float, int, Drain]] = []
        """(not before, attempts so far, what)"""
        self.next_comment = 0.0
        self.dead: list[Drain] = []
        """drained, and to be set down"""
        self.downs_wait = False
        self.to_comment: list[events.FailoverFinished] = []
        """whose nodes have no comment yet"""
        self.closed_at: float | None = None
        self.complained: set[str] = set()

    def run(self) -> int:
        threading.Thread(target=self._read, daemon=True).start()
        early: list[bytes] = []
        while True:
            self._take(early)
            if self.story is None:
                self._begin(early)
            else:
                self._act(self.story)
            if self.closed_at is not None and (self._done() or time.monotonic() > self.closed_at + _LINGER):
                break
        self._set_down()
        for _, _, drain in self.drains:
            self.say(f"node {drain.node} could not be drained: {drain.reason}")
        return 0

    # --- input ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self.lines.put(line)
        self.lines.put(None)

    def _take(self, early: list[bytes]) -> None:
        """Wait a moment for events, then take all that are there."""
        try:
            line = self.lines.get(timeout=0.1)
            while True:
                if line is None:
                    self.closed_at = time.monotonic()
                elif self.story is None:
                    early.append(line)
                else:
                    self._note(line)
                line = self.lines.get_nowait()
        except queue.Empty:
            pass

    def _note(self, line: bytes) -> None:
        assert self.story is not None
        try:
            at, event = events.from_line(line)
        except (msgspec.MsgspecError, ValueError):
            return  # cut in the middle: the coordinator's process has ended
        self.story.note(event, at)
        if isinstance(event, events.FailoverFinished):
            self.to_comment.append(event)

    def _begin(self, early: list[bytes]) -> None:
        """The user's own comment stays in front of ours, so it has to be known first."""
        try:
            own = commands.comment(self.task.job)
        except SlurmError as e:
            self._complain("the job's comment cannot be read", e)
            time.sleep(0.5)
            return
        self.story = Chronicle(dict(enumerate(self.task.names)), own)
        self.downs_wait = not _has_accounting()
        for line in early:
            self._note(line)

    # --- output -----------------------------------------------------------------------------------------

    def _act(self, story: Chronicle) -> None:
        now = time.monotonic()
        self.drains += [(now, 0, drain) for drain in story.due(time.time())]
        for item in [one for one in self.drains if one[0] <= now]:
            self.drains.remove(item)
            self._drain(item[1], item[2])
        while self.to_comment and not story.waits():  # drains come first: this is only good to have
            self._comment_nodes(self.to_comment.pop(0))
        if story.begun and (now >= self.next_comment or self.closed_at is not None):
            self._comment(story)
        patient = self.closed_at is None or (not self._told(story) and now < self.closed_at + _LAST_COMMENT)
        if not (self.downs_wait and patient):
            self._set_down()

    def _comment(self, story: Chronicle) -> None:
        text = story.comment()
        if text == self.written:
            return
        now = time.monotonic()
        self.next_comment = now + _COMMENT_INTERVAL
        try:
            commands.set_comment(self.task.job, text)
            self.written = text
        except SlurmError as e:
            self._complain("the job's comment cannot be set", e)
            self.next_comment = now + _RETRY
            time.sleep(0.2)
        if full := story.full_story():
            self._ask("jobcomment", full[-helper.LONGEST_TEXT :])

    def _set_down(self) -> None:
        """A dead node stays out until an administrator looks, and its tasks are killed if they live behind a cut link.

        Slurm takes it out of the job then, and srun waits for it no longer. Without slurmdbd, 22.05 takes no comment
        for a job that has lost a node (it waits for an index from the database): so there it comes last.
        """
        for drain in list(self.dead):
            if probe.answers(drain.node):
                self.dead.remove(drain)  # it was away for a while; being drained is enough
            elif self._ask("down", drain.node, helper.clean(drain.reason)):
                self.dead.remove(drain)
                self.say(f"node {drain.node} does not answer and is set down")

    def _told(self, story: Chronicle) -> bool:
        return not story.begun or self.written == story.comment()

    def _done(self) -> bool:
        story = self.story
        if story is None or self.drains or self.dead or self.to_comment or story.waits():
            return False
        return self._told(story)

    def _drain(self, attempts: int, drain: Drain) -> None:
        """Before it is set down: no other job may land there when the node leaves ours.

        A node whose kernel has closed the connection, or that never joined, may have lost no more than our process.
        """
        answers = None if "silent" in drain.reason else probe.answers(drain.node)
        if answers:
            self.say(f"node {drain.node} is not drained, because it answers: {drain.reason}")
            return
        try:
            helper.ask(Path(self.task.helper), "drain", drain.node, helper.clean(drain.reason))
        except SlurmError as e:
            if helper.is_final(e) or attempts >= _ATTEMPTS or not Path(self.task.helper).exists():
                self._complain(f"node {drain.node} is not drained", e)
            else:
                self.drains.append((time.monotonic() + _RETRY, attempts + 1, drain))
            return
        self.say(f"node {drain.node} is draining: {drain.reason}")
        if answers is False or not probe.answers(drain.node):
            self.dead.append(drain)

    def _comment_nodes(self, event: events.FailoverFinished) -> None:
        ways = {(move.from_node, move.to_node) for move in event.moves if move.from_node != move.to_node}
        for source, target in sorted(ways):
            name, successor = self.task.names[source], self.task.names[target]
            text = f"torchpass job {self.task.job}: replaced by {successor} at step {event.step}"
            self._ask("nodecomment", name, f"{text} in {event.seconds:.1f} s")

    def _ask(self, *words: str) -> bool:
        """For what is good to have: no helper, no harm."""
        try:
            helper.ask(Path(self.task.helper), *(helper.clean(word) for word in words if word))
        except SlurmError:
            return False
        return True

    def _complain(self, what: str, error: SlurmError) -> None:
        if what not in self.complained:
            self.complained.add(what)
            self.say(f"{what}: {error}")


def _has_accounting() -> bool:
    try:
        return commands.config().get("AccountingStorageType") == "accounting_storage/slurmdbd"
    except SlurmError:
        return False


def main(arguments: Sequence[str]) -> int:
    # Slurm signals every process of a job that ends. This one has to tell how it ended.
    for number in signals.ALL:
        signal.signal(number, signal.SIG_IGN)
    task = msgspec.json.decode(arguments[0], type=Task)

    def say(text: str) -> None:
        os.write(2, f"torchpass: {text}\n".encode(errors="replace"))

    return Reporter(task, say).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What every launcher does: it has the supervisors of this machine forked, outlives them, and speaks to the user.

It is the subreaper of everything below it: supervisors are its children, and so is what a killed supervisor
leaves behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping

from tpwrap.control.coordinator import Coordinator, Verdict
from tpwrap.core import endings, events, exits
from tpwrap.core.timeouts import Timeouts
from tpwrap.launch import processes
from tpwrap.launch.command import Command
from tpwrap.launch.forge import Forge, StartError
from tpwrap.launch.interpreter import job_environment
from tpwrap.launch.logs import Writer
from tpwrap.launch.reaper import Reaper
from tpwrap.launch.rundir import RunDir
from tpwrap.report import story

_WRITE_OUT = 5.0


def run(host: Host) -> int:
    """Run `host` to its end, and leave nothing behind; returns the exit code of the command."""
    _log_to(host.rundir)
    processes.become_subreaper()
    try:
        return asyncio.run(host.run())
    finally:
        processes.kill_family(os.getpid())
        host.rundir.close()


def _log_to(rundir: RunDir) -> None:
    """The coordinator's reasons go to a file: people see events, whoever looks for a cause sees both."""
    handler = logging.FileHandler(rundir.path / "launcher.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    log = logging.getLogger("tpwrap")
    log.setLevel(logging.INFO)
    log.addHandler(handler)


class Host(ABC):
    """One launcher, from the start of its first process to the end of its last."""

    def __init__(
        self, command: Command, environment: Mapping[str, str], rundir: RunDir, failure_timeout: float, quiet: bool
    ) -> None:
        self.command = command
        self.env = job_environment(environment)
        self.rundir = rundir
        self.quiet = quiet
        self.timeouts = Timeouts.derive(failure_timeout)
        self.supervisors: dict[int, int] = {}
        """node -> pid, and process group, of those that live"""
        self.exit_codes: dict[int, int] = {}
        """of supervisors that have ended"""
        self.alone = asyncio.Event()
        """the last supervisor has ended"""
        self.forge: Forge | None = None
        self.coordinator: Coordinator | None = None
        """None: another launcher has it, or it has not started yet"""
        self.names: dict[int, str] = {}
        """node -> what Slurm calls it"""
        self._notices: set[str] = set()
        self._down: set[int] = set()
        self._counts = ""

    async def run(self) -> int:
        self._writer = Writer()
        self._reaper = Reaper()
        self.listen_to_signals()
        try:
            return await self.work()
        except StartError as e:
            if (code := self.stopped_before_start()) is not None:
                return code
            self.say(f"cannot start: {e}", always=True)
            return endings.INTERNAL
        except Exception:
            self._write(traceback.format_exc())
            self.say(f"internal error, please report it with {self.rundir.path}", always=True)
            return endings.INTERNAL
        finally:
            await self._end_supervisors()
            if self.forge is not None:
                self.forge.close()
            self._writer.close(_WRITE_OUT)
            self._reaper.close()

    @abstractmethod
    def listen_to_signals(self) -> None:
        """Install the handlers for what ends this launcher."""

    @abstractmethod
    async def work(self) -> int:
        """Start everything, wait for the end of the job; the exit code."""

    def stopped_before_start(self) -> int | None:
        """The exit code, if a signal is why the start failed."""
        return None

    # --- the job ----------------------------------------------------------------------------------------

    async def coordinate(self, coordinator: Coordinator) -> int:
        """Be the launcher with the coordinator, until the job has ended."""
        watch_store = asyncio.create_task(self._watch_store(coordinator))
        try:
            verdict = await coordinator.run()
        finally:
            watch_store.cancel()
        self._report(verdict)
        return verdict.exit_code

    async def _watch_store(self, coordinator: Coordinator) -> None:
        assert self.forge is not None
        await self.forge.store_lost()
        self.say("error: the rendezvous store has ended, so a failure can no longer be healed", always=True)
        coordinator.store_lost()

    # --- processes ------------------------------------------------------------------------------------

    def watch(self, node: int, pid: int) -> None:
        """`pid` is the supervisor of `node`."""
        self.supervisors[node] = pid
        self._reaper.watch(pid, lambda code: self._supervisor_exited(node, code))

    def watch_process(self, pid: int, ended: asyncio.Event) -> None:
        """Set `ended` when the child `pid` has ended."""
        self._reaper.watch(pid, lambda code: ended.set())

    def _supervisor_exited(self, node: int, returncode: int) -> None:
        # Its workers are in its group and must not act any more once the coordinator gives their ranks away.
        processes.kill_group(self.supervisors.pop(node))
        how = f"its supervisor {exits.describe(returncode)}"
        if self.coordinator is not None:
            self.coordinator.supervisor_died(node, how)
        self.exit_codes[node] = returncode
        if not self.supervisors:
            self.alone.set()

    async def _end_supervisors(self) -> None:
        """Supervisors end with the job; those that do not are killed, each with its whole node."""
        loop = asyncio.get_running_loop()
        for pid in self.supervisors.values():
            processes.send_signal(pid, signal.SIGTERM)
        deadline = loop.time() + self.timeouts.stop_grace + _WRITE_OUT
        while self.supervisors and loop.time() < deadline:
            await asyncio.sleep(0.01)
        for pid in self.supervisors.values():
            processes.kill_group(pid)

    # --- what people see ------------------------------------------------------------------------------

    def on_event(self, event: events.Event) -> None:
        """Tell the user, and end what the event says is lost."""
        if isinstance(event, events.NodeJoined) and event.name:
            self.names[event.node] = event.name
        if isinstance(event, events.NodeDown | events.SpareLost):
            self._down.add(event.node)
            if event.node in self.supervisors:
                # Its supervisor does not answer (it may be halted): end it, and with it the node.
                processes.kill_group(self.supervisors[event.node])
        if isinstance(event, events.RankFailed) and event.node in self._down:
            return  # the line about its node names it
        if isinstance(event, events.Notice):
            if event.text in self._notices:
                return
            self._notices.add(event.text)
        if isinstance(event, events.JobEnded):
            self._counts = f" ({story.counts(event)})"
        for line in (story.line(event, self.names) or "").splitlines():
            self.say(line)

    def is_down(self, node: int) -> bool:
        """Whether the coordinator has given `node` up."""
        return node in self._down

    def _report(self, verdict: Verdict) -> None:
        if verdict.traceback:
            self._write(verdict.traceback.rstrip("\n") + "\n")
        if verdict.exit_code == 0:
            self.say(f"{verdict.reason}{self._counts}")
        else:
            self.say(f"exit code {verdict.exit_code}: {verdict.reason}{self._counts}", always=True)

    def say(self, text: str, always: bool = False) -> None:
        """One line for the user; with --quiet only if `always`."""
        if always or not self.quiet:
            self._write(f"torchpass: {text}\n")

    def _write(self, text: str) -> None:
        self._writer.write(2, text.encode(errors="backslashreplace"))

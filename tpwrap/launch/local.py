"""A whole job on one machine: each node is a supervisor in a process group of its own.

The coordinator runs here, in the launcher, so that any node can be killed. The launcher is the subreaper of
everything below it: supervisors are its children, and so is what a killed supervisor leaves behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import traceback
from collections.abc import Mapping

from tpwrap.control.coordinator import Coordinator, Verdict
from tpwrap.core import events
from tpwrap.core.config import Settings
from tpwrap.core.job import Job
from tpwrap.core.timeouts import Timeouts
from tpwrap.launch import processes
from tpwrap.launch.command import Command
from tpwrap.launch.forge import Forge, StartError
from tpwrap.launch.interpreter import job_environment
from tpwrap.launch.logs import Writer
from tpwrap.launch.node import NodeSpec
from tpwrap.launch.reaper import Reaper
from tpwrap.launch.rundir import RunDir
from tpwrap.launch.supervisor import describe_exit
from tpwrap.report import story

HOST = "127.0.0.1"
INTERNAL_ERROR = 70
_WRITE_OUT = 5.0
_SAME_KEY_PRESS = 0.5
"""timeout(1), make and job managers pass a signal on to us that we have got from the terminal, too"""


def run_local(settings: Settings, job: Job, command: Command, environment: Mapping[str, str]) -> int:
    """Run a job to its end; returns the exit code of the command. ConfigError before anything has started."""
    rundir = RunDir.create(settings)
    _log_to(rundir)
    processes.become_subreaper()
    try:
        return asyncio.run(LocalRun(job, command, environment, rundir, settings.config.quiet).run())
    finally:
        processes.kill_family(os.getpid())
        rundir.close()


def _log_to(rundir: RunDir) -> None:
    """The coordinator's reasons go to a file: people see events, whoever looks for a cause sees both."""
    handler = logging.FileHandler(rundir.path / "launcher.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    log = logging.getLogger("tpwrap")
    log.setLevel(logging.INFO)
    log.addHandler(handler)


class LocalRun:
    """One job, from the start of its first process to the end of its last."""

    def __init__(self, job: Job, command: Command, environment: Mapping[str, str], rundir: RunDir, quiet: bool) -> None:
        self.job = job
        self.command = command
        self.env = job_environment(environment)
        self.rundir = rundir
        self.quiet = quiet
        self.timeouts = Timeouts.derive(job.failure_timeout)
        self.supervisors: dict[int, int] = {}
        """node -> pid, and process group, of those that live"""
        self._forge: Forge | None = None
        self._coordinator: Coordinator | None = None
        self._stopped_by: signal.Signals | None = None
        self._stopped_at = 0.0
        self._down: set[int] = set()
        self._notices: set[str] = set()
        self._counts = ""

    async def run(self) -> int:
        self._writer = Writer()
        self._reaper = Reaper()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            loop.add_signal_handler(number, self._on_stop, number)
        # A stopped coordinator looks dead to every supervisor, so Ctrl-Z would end the job.
        loop.add_signal_handler(signal.SIGTSTP, self._say, "Ctrl-Z has no effect, training goes on")
        try:
            verdict = await self._train()
        except StartError as e:
            if self._stopped_by is not None:
                return 128 + self._stopped_by
            self._say(f"cannot start: {e}", always=True)
            return INTERNAL_ERROR
        except Exception:
            self._write(traceback.format_exc())
            self._say(f"internal error, please report it with {self.rundir.path}", always=True)
            return INTERNAL_ERROR
        else:
            self._report(verdict)
            return verdict.exit_code
        finally:
            await self._end_supervisors()
            if self._forge is not None:
                self._forge.close()
            self._writer.close(_WRITE_OUT)
            self._reaper.close()

    async def _train(self) -> Verdict:
        self._introduce()
        key = self.rundir.new_key()
        self._forge = Forge.start(HOST, self.command.python is not None, self.env)
        store = f"{HOST}:{await self._forge.store_port()}"
        coordinator = Coordinator(self.job, key, store, self.rundir.path, self._on_event)
        port = await coordinator.start(HOST)
        pids = await self._forge.fork([self._spec(node, port) for node in range(self.job.total_nodes)])
        self.supervisors = dict(enumerate(pids))
        for node, pid in enumerate(pids):
            self._watch(node, pid)
        self._coordinator = coordinator
        if self._stopped_by is not None:
            coordinator.stop(self._stopped_by.name)
        watch_store = asyncio.create_task(self._watch_store(coordinator))
        try:
            return await coordinator.run()
        finally:
            watch_store.cancel()

    def _spec(self, node: int, port: int) -> NodeSpec:
        return NodeSpec(
            node=node,
            slots=self.job.nproc_per_node,
            spare=self.job.is_spare_at_start(node),
            warm=self.job.warm,
            host=HOST,
            coordinator=(HOST, port),
            key_file=str(self.rundir.key_file),
            run_dir=str(self.rundir.path),
            log_dir=str(self.rundir.log_dir),
            socket=self.rundir.socket(node),
            failure_timeout=self.job.failure_timeout,
            command=self.command,
            env=self.env,
        )

    # --- processes ------------------------------------------------------------------------------------

    def _watch(self, node: int, pid: int) -> None:
        self._reaper.watch(pid, lambda code: self._supervisor_exited(node, code))

    def _supervisor_exited(self, node: int, returncode: int) -> None:
        # Its workers are in its group and must not act any more once the coordinator gives their ranks away.
        processes.kill_group(self.supervisors.pop(node))
        if self._coordinator is not None:
            self._coordinator.supervisor_died(node, f"its supervisor {describe_exit(returncode)}")

    async def _watch_store(self, coordinator: Coordinator) -> None:
        assert self._forge is not None
        await self._forge.store_lost()
        self._say("error: the rendezvous store has ended, so a failure can no longer be healed", always=True)
        coordinator.store_lost()

    def _on_stop(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._stopped_by is not None:
            if now - self._stopped_at < _SAME_KEY_PRESS:
                return
            self._say("killing everything now", always=True)
            for pid in self.supervisors.values():
                processes.kill_group(pid)
            return
        self._stopped_by, self._stopped_at = number, now
        self._say(f"{signal.Signals(number).name}: ending the job (once more: at once)", always=True)
        if self._coordinator is not None:
            self._coordinator.stop("SIGINT" if number == signal.SIGINT else "SIGTERM")
        elif self._forge is not None:
            processes.send_signal(self._forge.pid, signal.SIGKILL)

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

    def _on_event(self, event: events.Event) -> None:
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
        line = story.line(event)
        if line is not None:
            self._say(line)

    def _introduce(self) -> None:
        shape = story.shape(self.job.nodes, self.job.spares, self.job.nproc_per_node)
        self._say(f"{shape}: {shlex.join(self.command.argv)}")
        self._say(f"logs: {self.rundir.log_dir}/rank*.log   events: torchpass events {self.rundir.path}")

    def _report(self, verdict: Verdict) -> None:
        if verdict.traceback:
            self._write(verdict.traceback.rstrip("\n") + "\n")
        if verdict.exit_code == 0:
            self._say(f"{verdict.reason}{self._counts}")
        else:
            self._say(f"exit code {verdict.exit_code}: {verdict.reason}{self._counts}", always=True)

    def _say(self, text: str, always: bool = False) -> None:
        if always or not self.quiet:
            self._write(f"torchpass: {text}\n")

    def _write(self, text: str) -> None:
        self._writer.write(2, text.encode(errors="backslashreplace"))

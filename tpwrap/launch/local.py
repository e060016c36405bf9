"""A whole job on one machine: each node is a supervisor in a process group of its own.

The coordinator runs here, in the launcher, so that any node can be killed.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Mapping

from tpwrap.control.coordinator import Coordinator
from tpwrap.core.config import Settings
from tpwrap.core.job import Job
from tpwrap.launch import host, processes
from tpwrap.launch.command import Command
from tpwrap.launch.forge import Forge
from tpwrap.launch.node import NodeSpec
from tpwrap.launch.rundir import RunDir
from tpwrap.report import story

HOST = "127.0.0.1"
_SAME_KEY_PRESS = 0.5
"""timeout(1), make and job managers pass a signal on to us that we have got from the terminal, too"""


def run_local(settings: Settings, job: Job, command: Command, environment: Mapping[str, str]) -> int:
    """Run a job to its end; returns the exit code of the command. ConfigError before anything has started."""
    rundir = RunDir.create(settings)
    return host.run(LocalRun(job, command, environment, rundir, settings.config.quiet))


class LocalRun(host.Host):
    def __init__(self, job: Job, command: Command, environment: Mapping[str, str], rundir: RunDir, quiet: bool) -> None:
        super().__init__(command, environment, rundir, job.failure_timeout, quiet)
        self.job = job
        self._stopped_by: signal.Signals | None = None
        self._stopped_at = 0.0

    def listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            loop.add_signal_handler(number, self._on_stop, number)
        # A stopped coordinator looks dead to every supervisor, so Ctrl-Z would end the job.
        loop.add_signal_handler(signal.SIGTSTP, self.say, "Ctrl-Z has no effect, training goes on")

    async def work(self) -> int:
        self._introduce()
        key = self.rundir.new_key()
        self.forge = Forge.start(HOST, self.command.python is not None, self.env)
        store = f"{HOST}:{await self.forge.store_port()}"
        coordinator = Coordinator(self.job, key, store, self.rundir.path, self.on_event)
        port = await coordinator.start(HOST)
        pids = await self.forge.fork([self._spec(node, port) for node in range(self.job.total_nodes)])
        for node, pid in enumerate(pids):
            self.watch(node, pid)
        self.coordinator = coordinator
        if self._stopped_by is not None:
            coordinator.stop(self._stopped_by.name)
        return await self.coordinate(coordinator)

    def stopped_before_start(self) -> int | None:
        return None if self._stopped_by is None else 128 + self._stopped_by

    def _spec(self, node: int, port: int) -> NodeSpec:
        return NodeSpec(
            node=node,
            slots=self.job.nproc_per_node,
            warm=self.job.warm,
            host=HOST,
            coordinator=(HOST, [port]),
            connect_within=self.job.failure_timeout / 2,
            key_file=str(self.rundir.key_file),
            run_dir=str(self.rundir.path),
            log_dir=str(self.rundir.log_dir),
            socket=self.rundir.socket(node),
            failure_timeout=self.job.failure_timeout,
            command=self.command,
            env=self.env,
        )

    def _on_stop(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._stopped_by is not None:
            if now - self._stopped_at < _SAME_KEY_PRESS:
                return
            self.say("killing everything now", always=True)
            for pid in self.supervisors.values():
                processes.kill_group(pid)
            return
        self._stopped_by, self._stopped_at = number, now
        self.say(f"{number.name}: ending the job (once more: at once)", always=True)
        if self.coordinator is not None:
            self.coordinator.stop("SIGINT" if number == signal.SIGINT else "SIGTERM")
        elif self.forge is not None:
            processes.send_signal(self.forge.pid, signal.SIGKILL)

    def _introduce(self) -> None:
        shape = story.shape(self.job.nodes, self.job.spares, self.job.nproc_per_node)
        self.say(f"{shape}: {shlex.join(self.command.argv)}")
        self.say(f"logs: {self.rundir.log_dir}/rank*.log   events: torchpass events {self.rundir.path}")

"""The supervisor: one a node. It owns the node's workers and outlives each of them.

It starts workers, relays their messages, reports their exits, kills on request, and keeps one warm worker in
each slot. It decides nothing about ranks: the coordinator does. When the coordinator says so, or is lost, it
ends everything on its node.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import traceback
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tpwrap.control.client import CoordinatorLink
from tpwrap.control.messages import (
    PROTOCOL,
    Assign,
    Bye,
    Failed,
    Finished,
    FromWorker,
    Hello,
    Kill,
    Leaving,
    Muted,
    Resumed,
    SetupDone,
    Shutdown,
    SlotFailed,
    ToWorker,
    Warm,
    WarmReady,
    WorkerExited,
    WorkerMessage,
)
from tpwrap.control.sidecars import SidecarServer
from tpwrap.core import exits
from tpwrap.core.endings import COORDINATOR_LOST
from tpwrap.core.timeouts import Timeouts
from tpwrap.launch import processes, verdict, zygote
from tpwrap.launch.logs import Labels, LogFiles, Relay, Writer
from tpwrap.launch.node import NodeSpec
from tpwrap.launch.nursery import Nursery
from tpwrap.launch.reaper import Reaper
from tpwrap.launch.repeats import Repeats, take_from
from tpwrap.launch.worker import Worker, WorkerLink

_START_ATTEMPTS = 3
_FIRST_BACKOFF = 0.25
_EXIT_AFTER_DISCONNECT = 1.0
_READ_OUT = 1.0
_WRITE_OUT = 5.0
_MEANT_FOR_THE_JOB = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_SIGNAL_SPREAD = 0.3
"""so long after the first process of a job the last one may get the signal that Slurm sends to all of them"""
SITE = Path(__file__).resolve().parent / "site"


class Slot:
    """One place for a rank: its active worker, and the warm one that waits there."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.active: Worker | None = None
        self.warm: Worker | None = None
        self.failed_starts = 0
        self.started = 0
        """workers started here so far, for their names"""
        self.starting = False


def run(spec: NodeSpec, zygote_socket: socket.socket | None, zygote_pid: int) -> int:
    """Be the supervisor of a node; returns its exit code. Blocks."""
    processes.become_subreaper()
    return asyncio.run(Supervisor(spec, zygote_socket, zygote_pid).run())


class Supervisor:
    def __init__(self, spec: NodeSpec, zygote_socket: socket.socket | None, zygote_pid: int) -> None:
        self.spec = spec
        self.timeouts = Timeouts.derive(spec.failure_timeout)
        self.slots = [Slot(i) for i in range(spec.slots)]
        self.workers: dict[str, Worker] = {}
        """all whose process has not ended"""
        self.ending = ""
        self.exit_code = 0
        self._signals: set[int] = set()
        """what Slurm, or somebody else, has sent to us"""
        self._ended = asyncio.Event()
        self._servers: list[asyncio.Server | SidecarServer] = []
        self._link: CoordinatorLink | None = None
        self._outbox: list[FromWorker | WorkerExited | SlotFailed] = []
        """what workers said before the coordinator was reached"""
        self._inherited = (zygote_socket, zygote_pid)
        self._tasks: set[asyncio.Task[None]] = set()
        self._decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)

    # --- life -----------------------------------------------------------------------------------------

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._writer = Writer()
        self._files = LogFiles(Path(self.spec.log_dir))
        self._reaper = Reaper()
        self._nursery = Nursery(self.spec, self._reaper, self._say, self.timeouts.warm)
        inherited, pid = self._inherited
        if inherited is not None:
            self._nursery.adopt(inherited, pid)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._told_to_end, number)
        if self.spec.slurm:
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                loop.add_signal_handler(number, self._signals.add, number)
        code = 0
        try:
            await self._serve()
            code = self.exit_code
        except Exception as e:
            code = 1
            # Only the coordinator's end is worth no stack: the launcher tells that story.
            detail = str(e) if isinstance(e, OSError) else traceback.format_exc()
            self._say(f"supervisor of node {self.spec.node} failed: {detail}")
        finally:
            await self._end_all()
        return code

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        key = bytes.fromhex(Path(self.spec.key_file).read_text())
        server = await loop.create_unix_server(
            lambda: WorkerLink(self._on_hello, self._on_frame, self._on_disconnect), self.spec.socket
        )
        sidecars = SidecarServer(key)
        port = await sidecars.start(self.spec.host)
        hello = Hello(
            protocol=PROTOCOL,
            node=self.spec.node,
            host=self.spec.host,
            pid=os.getpid(),
            slots=self.spec.slots,
            sidecars=f"{self.spec.host}:{port}",
            name=self.spec.name,
            block=self.spec.block,
            vital=self.spec.vital,
            sick=self.spec.sick,
        )
        # Warming up needs no coordinator, so it begins at once.
        for slot in self.slots:
            self._fill(slot)
        self._servers += [server, sidecars]
        self._link = await CoordinatorLink.open(
            *self.spec.coordinator, key, hello, self.timeouts, self.spec.connect_within
        )
        for message in self._outbox:
            self._link.post(message)
        self._background(self._obey(self._link))
        self._background(self._watch_stopped())
        await self._ended.wait()

    async def _obey(self, link: CoordinatorLink) -> None:
        """Carry out what the coordinator says, until it says to end or is lost."""
        async for message in link.messages():
            if isinstance(message, ToWorker):
                self._to_worker(message)
            elif isinstance(message, Kill):
                worker = self.workers.get(message.worker)
                if worker is not None:
                    worker.kill()
            elif isinstance(message, Shutdown):
                if message.exit_code is None:
                    self.exit_code = 1
                else:
                    self._leave_verdict(message.exit_code)
                self._end(message.reason)
                return
        self.exit_code = COORDINATOR_LOST
        self._end(f"the coordinator is lost ({link.why_lost})")

    def _leave_verdict(self, exit_code: int) -> None:
        self.exit_code = exit_code
        if self.spec.verdict_file is not None:
            verdict.leave(Path(self.spec.verdict_file), exit_code)

    def _told_to_end(self, number: signal.Signals) -> None:
        """By a signal. Under Slurm it goes to all processes of the job (scancel, the time limit): the job shall end,
        and no node of it has failed."""
        if not self.spec.slurm or self._link is None or self.ending:
            self._end(f"the supervisor got {number.name}")
        elif number not in self._signals:
            self._signals.add(number)
            self._link.post(Leaving(number.name))
            asyncio.get_running_loop().call_later(
                self.timeouts.stop_grace, self._end, f"the supervisor got {number.name}"
            )

    def _end(self, reason: str) -> None:
        if not self.ending:
            self.ending = reason or "shutdown"
            self._ended.set()

    async def _end_all(self) -> None:
        """End every process of this node, politely at first."""
        self.ending = self.ending or "failure"
        for worker in self.workers.values():
            worker.terminate()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeouts.stop_grace
        while self.workers and loop.time() < deadline:
            await asyncio.sleep(0.02)
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        self._nursery.close()
        # Whatever the workers have started and left behind is below us too, because we are its subreaper.
        for _ in range(50):
            if not processes.kill_family(os.getpid()):
                break
            await asyncio.sleep(0.02)
        for worker in list(self.workers.values()):
            self._close_output(worker)
        if self._link is not None:
            self._link.close()
        try:
            os.unlink(self.spec.socket)
        except OSError:
            pass
        self._writer.close(_WRITE_OUT)
        self._reaper.close()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # A supervisor that has stopped listening or watching is worse than none: give the node up.
            self._say("".join(traceback.format_exception(error)).rstrip())
            self._end(f"internal error: {error}")

    def _say(self, text: str) -> None:
        self._writer.write(2, f"torchpass: {text}\n".encode())

    # --- slots ----------------------------------------------------------------------------------------

    def _fill(self, slot: Slot) -> None:
        """Start a warm worker in `slot` if one should be there."""
        if self.ending or slot.warm is not None or slot.starting or slot.failed_starts >= _START_ATTEMPTS:
            return
        if slot.active is not None and not (slot.active.settled and self.spec.warm):
            # Beside a rank that starts or recovers, a warm-up would compete with it for the processor.
            return
        slot.starting = True
        self._background(self._start(slot))

    async def _start(self, slot: Slot) -> None:
        if slot.failed_starts:
            await asyncio.sleep(_FIRST_BACKOFF * 2 ** (slot.failed_starts - 1))
        for attempt in range(_START_ATTEMPTS):
            worker = self._new_worker(slot)
            try:
                await self._spawn(worker)
                break
            except zygote.ZygoteLost as e:
                # Another zygote is on its way, and no attempt of this slot has failed.
                if attempt < _START_ATTEMPTS - 1 and not self.ending:
                    self._disown(worker)
                    continue
                why = f"the process that forks workers was lost ({e})"
            except OSError as e:
                why = str(e)
            self._say(f"node {self.spec.node}: cannot start a worker: {why}")
            slot.starting = False
            self._exited(worker, 1)
            return
        slot.starting = False
        if self.ending:  # it was not there yet when the others were asked to end
            worker.terminate()
        await asyncio.sleep(self.timeouts.warm)
        if not worker.warm and worker.returncode is None:
            self._say(f"node {self.spec.node}: {worker.name} is not warm after {self.timeouts.warm:g} s; killing it")
            worker.kill()

    def _disown(self, worker: Worker) -> None:
        """Nobody knows whether it was made before its zygote was lost. It may even have said that it is warm."""
        del self.workers[worker.name]  # should it come only now, it is refused and ends
        self._post(WorkerExited(worker.slot, worker.name, -signal.SIGKILL))
        if worker.link is not None:
            worker.kill()
            worker.link.close()

    def _new_worker(self, slot: Slot) -> Worker:
        name = f"n{self.spec.node}s{slot.index}w{slot.started}"
        slot.started += 1
        slot.warm = Worker(name, slot.index, Labels(f"node {self.spec.node} warm", f"node{self.spec.node}"))
        self.workers[name] = slot.warm
        return slot.warm

    async def _spawn(self, worker: Worker) -> None:
        """Have the zygote start the process of `worker`."""
        command = self.spec.command
        cpus = self.spec.cpus[worker.slot] if self.spec.cpus else []
        request = zygote.Spawn(command.argv, command.python, self._environment(worker), cpus)
        ends: list[int] = []
        try:
            out_read, out_write = os.pipe()
            ends += [out_read, out_write]
            err_read, err_write = os.pipe()
            ends += [err_read, err_write]
            worker.pid = await self._nursery.fork(
                request, out_write, err_write, lambda code: self._exited(worker, code)
            )
            for fd, terminal in ((out_read, 1), (err_read, 2)):
                worker.relays.append(Relay(fd, terminal, worker.labels, self._writer, self._files))
                ends.remove(fd)
        finally:
            for fd in ends:
                os.close(fd)

    def _environment(self, worker: Worker) -> dict[str, str]:
        env = dict(self.spec.env)
        env |= {
            "TORCHPASS_SOCKET": self.spec.socket,
            "TORCHPASS_WORKER": worker.name,
            "TORCHPASS_RUN_DIR": self.spec.run_dir,
            "TORCHPASS_KEY_FILE": self.spec.key_file,
            "TORCHPASS_FAILURE_TIMEOUT": str(self.spec.failure_timeout),
            "TORCHPASS_NODE": str(self.spec.node),
            "TORCHPASS_SLOT": str(worker.slot),
            "TORCHPASS_HOST": self.spec.host,
        }
        if self.spec.command.python is None:
            path = env.get("PYTHONPATH")
            env["PYTHONPATH"] = f"{SITE}:{path}" if path else str(SITE)
            env.setdefault("PYTHONUNBUFFERED", "1")  # as for forked workers: a killed rank loses no line
        return env

    # --- messages -------------------------------------------------------------------------------------

    def _to_worker(self, message: ToWorker) -> None:
        worker = self.workers.get(message.worker)
        if worker is None:
            return  # it has ended, and its exit is on the way to the coordinator
        if isinstance(message.message, Assign):
            self._promote(worker, message.message.rank)
        elif isinstance(message.message, Warm):
            self._nursery.learn(message.message.modules)
        elif isinstance(message.message, Bye):
            worker.leaving = True
        worker.send(message.message)

    def _promote(self, worker: Worker, rank: int) -> None:
        slot = self.slots[worker.slot]
        if slot.warm is worker:
            slot.warm = None
        slot.active = worker
        worker.rank = rank
        worker.labels.prefix, worker.labels.file = f"rank {rank}", f"rank{rank}"

    def _on_hello(self, body: bytes, link: WorkerLink) -> Worker | None:
        try:
            worker = self.workers.get(msgspec.msgpack.decode(body, type=str))
        except msgspec.MsgspecError:
            return None
        if worker is None or worker.link is not None:
            return None
        worker.link, worker.peer = link, link.peer
        return worker

    def _on_frame(self, worker: Worker, body: bytes) -> None:
        try:
            message = self._decoder.decode(body)
        except msgspec.MsgspecError as e:
            self._say(f"node {self.spec.node}: {worker.name} sent what is no message ({e}) and is killed")
            worker.kill()
            return
        if isinstance(message, Muted):
            self._expect_repeats(worker, message)
            return
        slot = self.slots[worker.slot]
        if isinstance(message, WarmReady):
            worker.warm = True
            slot.failed_starts = 0
        elif isinstance(message, SetupDone | Resumed):
            worker.settled = True
            if isinstance(message, SetupDone):
                self._nursery.learn(message.modules)
        elif isinstance(message, Finished | Failed):
            worker.leaving = True
        self._post(FromWorker(worker.slot, worker.name, message))
        self._fill(slot)

    def _expect_repeats(self, worker: Worker, muted: Muted) -> None:
        """The rank's log tells what it will print again. Until that is read, nothing that it prints is taken."""
        log = self._files.path(worker.labels.file)
        for relay in worker.relays:
            relay.hold()

        def expect(repeats: Repeats) -> None:
            for relay in worker.relays:
                relay.expect(repeats)

        def read() -> None:
            try:
                lines = take_from(log, muted.lines, muted.last)
            except OSError:
                lines = []  # printed twice, then
            try:
                loop.call_soon_threadsafe(expect, Repeats(lines))
            except RuntimeError:
                pass  # the supervisor has ended

        loop = asyncio.get_running_loop()
        self._writer.then(read)

    def _post(self, message: FromWorker | WorkerExited | SlotFailed) -> None:
        if self._link is None:
            self._outbox.append(message)
        else:
            self._link.post(message)

    # --- exits ----------------------------------------------------------------------------------------

    def _exited(self, worker: Worker, returncode: int) -> None:
        """The root process of `worker` has ended (it is a zombie until we return)."""
        worker.returncode = returncode
        self._background(self._after_exit(worker, returncode))

    async def _after_exit(self, worker: Worker, returncode: int) -> None:
        # What it said before it died is news that must come first.
        deadline = asyncio.get_running_loop().time() + _READ_OUT
        while worker.link is not None and worker.link.unread():
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0)
        if self.spec.slurm and worker.rank is not None and -returncode in _MEANT_FOR_THE_JOB:
            await asyncio.sleep(_SIGNAL_SPREAD)
            if -returncode in self._signals and self._link is not None:
                self._link.post(Leaving(signal.Signals(-returncode).name))
        self.workers.pop(worker.name, None)
        self._post(WorkerExited(worker.slot, worker.name, returncode, worker.hung))
        self._close_output(worker)
        if worker.link is not None:
            worker.link.close()
        slot = self.slots[worker.slot]
        if slot.active is worker:
            slot.active = None
            slot.failed_starts = 0  # now a worker is needed here: try again
        elif slot.warm is worker:
            slot.warm = None
            slot.failed_starts = 0 if worker.warm else slot.failed_starts + 1
            if slot.failed_starts >= _START_ATTEMPTS and not self.ending:
                how = exits.describe(returncode)
                how = f"{slot.failed_starts} in a row ended before they were ready (the last {how})"
                self._post(SlotFailed(slot.index, f"{how}; see {self.spec.log_dir}", returncode))
        self._fill(slot)
        await self._kill_left_behind()

    async def _kill_left_behind(self) -> None:
        """Kill what dead workers leave: data loaders, children of a shell. All of it has become our own."""
        async with self._nursery.lock:  # a worker that is being made would look like such a leftover
            known = {w.pid for w in self.workers.values()} | {self._nursery.pid}
            for pid in processes.children(os.getpid()):
                # A service that a living worker has started and let go of says so in its environment.
                if pid in known or processes.variable(pid, "TORCHPASS_WORKER") in self.workers:
                    continue
                for below in [pid, *processes.family(pid)]:
                    processes.send_signal(below, signal.SIGKILL)

    def _close_output(self, worker: Worker) -> None:
        for relay in worker.relays:
            relay.close()

    def _on_disconnect(self, worker: Worker) -> None:
        if worker.returncode is None and not worker.leaving and not self.ending:
            self._background(self._expect_exit(worker))

    async def _expect_exit(self, worker: Worker) -> None:
        """A worker that has hung up must end: if a shell around it lives on, nobody speaks for the rank."""
        await asyncio.sleep(_EXIT_AFTER_DISCONNECT)
        if worker.returncode is None and not worker.leaving:
            worker.kill()

    async def _watch_stopped(self) -> None:
        """A worker that is halted (SIGSTOP) neither ends nor answers; only its state tells."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.timeouts.hung / 10)
            self._nursery.watch_stopped(self.timeouts.hung)
            for worker in list(self.workers.values()):
                if not worker.is_stopped():
                    worker.stopped_since = None
                elif worker.stopped_since is None:
                    worker.stopped_since = loop.time()
                elif loop.time() - worker.stopped_since > self.timeouts.hung:
                    worker.hung = True
                    worker.kill()


def main(arguments: Sequence[str]) -> int:
    """arguments: FILE, with a NodeSpec as JSON. A supervisor without a template."""
    return run(msgspec.json.decode(Path(arguments[0]).read_bytes(), type=NodeSpec), None, 0)

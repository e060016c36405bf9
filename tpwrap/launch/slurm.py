"""A job under Slurm: `srun tpwrap python train.py`. Every task of the step runs this.

The first task of a node is its launcher: it has one supervisor, and siblings that hold their places. One of these
launchers has the coordinator and the store as well. All tasks derive who that is, and on which ports it listens,
from what Slurm tells each of them, so that they need no file system in common.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec

from tpwrap.control.coordinator import Coordinator
from tpwrap.core import events, signals
from tpwrap.core.config import ConfigError, Settings
from tpwrap.core.endings import COORDINATOR_LOST
from tpwrap.core.job import Job
from tpwrap.core.timeouts import Timeouts
from tpwrap.launch import host, processes, verdict
from tpwrap.launch.command import Command
from tpwrap.launch.config import make_job
from tpwrap.launch.forge import Forge, StartError
from tpwrap.launch.interpreter import module_command
from tpwrap.launch.node import NodeSpec
from tpwrap.launch.rundir import RunDir
from tpwrap.launch.siblings import Door, Place, all_devices, cpus_by_slot, hold
from tpwrap.report import story
from tpwrap.slurm import ending, helper, probe, reporter
from tpwrap.slurm.commands import SlurmError
from tpwrap.slurm.step import Step

log = logging.getLogger(__name__)

KEY = "TORCHPASS_KEY"
_PORTS = 8
_FIRST_PORT, _LAST_PORT = 20_000, 32_000  # below what Linux gives to outgoing connections
_TELL = 35.0
"""seconds that the end of the job waits for Slurm to be told: longer than the reporter tries"""
_LONGEST_DIRECTORY = 90


def run_slurm(settings: Settings, step: Step, command: Command, environment: Mapping[str, str]) -> int:
    """Be one task of the step until the job has ended; returns the exit code of the task."""
    settings = settings_of_step(settings, step)
    job = make_job(settings)
    times = Timeouts.derive(job.failure_timeout)
    private = private_directory(step)
    if step.local_id:
        return hold(private / "tasks", Place.of_this_task(step.local_id), times.join)
    batch = _batch_node(step)
    coordinating = coordinating_node(settings, step)
    rundir = StepDir(settings, step, private, coordinating == step.node)
    key = rundir.take_key(environment, coordinating == step.node, times.join)
    own = SlurmRun(job, step, command, environment, rundir, settings.config.quiet, key, coordinating, batch)
    code = host.run(own)
    if code == COORDINATOR_LOST:
        _take_out(step, coordinating)
    if batch not in (None, step.node) and (own.is_down(batch) or code == COORDINATOR_LOST):
        assert batch is not None
        ending.end(step.slurm_id, code, step.names[batch], step.node, _tell_and_log)
    return code


def settings_of_step(settings: Settings, step: Step) -> Settings:
    """The configuration with the sizes that the step has. ConfigError where they contradict each other."""
    config, nodes = settings.config, len(step.names) - settings.config.spares
    if nodes < 1:
        raise settings.error(
            "spares",
            f"{config.spares} spares leave none of the {len(step.names)} nodes of this step to train on; ask Slurm for "
            f"more nodes (sbatch -N counts training nodes alone with --torchpass-spares, else all of them)",
        )
    if "nodes" in settings.origin and config.nodes != nodes:
        raise settings.error(
            "nodes",
            f"the step has {len(step.names)} nodes, {config.spares} of them spares; leave it out: Slurm says how many",
        )
    slots = config.nproc_per_node
    if step.tasks_per_node > 1:
        slots = step.tasks_per_node
        if "nproc_per_node" in settings.origin and config.nproc_per_node != slots:
            raise settings.error("nproc_per_node", f"srun started {slots} tasks a node; leave it out, or start one")
    changed = msgspec.structs.replace(config, nodes=nodes, nproc_per_node=slots)
    return msgspec.structs.replace(settings, config=changed)


def coordinating_node(settings: Settings, step: Step) -> int:
    """The job's first node, where the batch script runs if there is one: the loss of both is no worse than the loss of
    one. Else the last. All tasks must agree on it, so nothing that one node may see otherwise has a say."""
    name = settings.config.coordinator
    if name is not None:
        if name not in step.names:
            raise settings.error("coordinator", f"{name} is no node of this step ({', '.join(step.names)})")
        return step.names.index(name)
    return step.first_of_job if step.first_of_job is not None else len(step.names) - 1


def _batch_node(step: Step) -> int | None:
    """Where the batch script runs; None under salloc, where srun runs on the host of the user's shell."""
    if step.first_of_job is None or not step.launched_from:
        return None
    try:
        found = socket.getaddrinfo(step.names[step.first_of_job], None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return step.first_of_job if step.launched_from in {str(address[4][0]) for address in found} else None


def ports(key: bytes) -> list[int]:
    """Where the coordinator may listen, in order: known to whoever holds the key, and to nobody else."""
    span = _LAST_PORT - _FIRST_PORT
    digests = (blake2b(key, digest_size=8, person=b"torchpass-port", salt=bytes([i])) for i in range(_PORTS))
    return [_FIRST_PORT + int.from_bytes(digest.digest(), "little") % span for digest in digests]


def own_address(name: str, peer: str) -> str:
    """The address of this node that others reach it by. name: what Slurm calls it. peer: another node's name."""
    for wanted in (name, socket.gethostname()):
        try:
            found = str(socket.getaddrinfo(wanted, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except OSError:
            continue
        if not ipaddress.ip_address(found).is_loopback:  # Debian gives a host's own name 127.0.1.1
            return found
    try:
        *_, target = socket.getaddrinfo(peer, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(target)  # sends nothing
            return str(sock.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def private_directory(step: Step) -> Path:
    """A directory of this node that only the job's user can enter; the same for all tasks of the step here."""
    made_by_prolog = helper.RUN / f"job{step.job_id}.{step.name}"
    if _is_ours(made_by_prolog):
        path = made_by_prolog / step.tag
    else:
        parent = Path("/tmp") / f"torchpass-{os.getuid()}"
        parent.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(parent):
            raise ConfigError(f"{parent} belongs to somebody else or is open to others; remove it or chmod 700 it")
        path = parent / f"{step.tag}.{step.name}"
    if len(os.fsencode(path)) > _LONGEST_DIRECTORY:  # of a socket's path the kernel takes 107 bytes
        path = path.with_name(blake2b(path.name.encode(), digest_size=8).hexdigest())
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


class StepDir(RunDir):
    """The run directory of a step: what people read is where they work, what must stay private is on the node."""

    def __init__(self, settings: Settings, step: Step, private: Path, coordinating: bool) -> None:
        config = settings.config
        again = f".r{step.restarts}" if step.restarts else ""
        path = Path(f"{config.run_dir}{again}" if config.run_dir else f"torchpass-{step.tag}").absolute()
        super().__init__(path, Path(config.log_dir).absolute() if config.log_dir else path / "logs")
        self.key_file = private / "key"
        self._private = private
        self._shared_key = path / "key"
        self._coordinating = coordinating
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            if coordinating:
                raise settings.error("run_dir", f"cannot make the directory: {e}") from None
        if coordinating and (path / "events.jsonl").exists():
            raise settings.error("run_dir", f"{path} holds an earlier run; name another directory")

    def take_key(self, environment: Mapping[str, str], make: bool, within: float) -> bytes:
        """The job's key: from the plugin, else by a file in a directory that all nodes share.

        Either way it is left in a file of this node for the processes of the job.
        """
        text = environment.get(KEY, "")
        if not text:
            text = self._make_shared_key() if make else self._await_shared_key(within)
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) != 32:
            raise ConfigError(f"{KEY} is not 64 hexadecimal digits; unset it, srun's TorchPass plugin makes one")
        self.key_file.unlink(missing_ok=True)
        fd = os.open(self.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as f:
            f.write(key.hex())
        return key

    def _make_shared_key(self) -> str:
        text = os.urandom(32).hex()
        self._shared_key.unlink(missing_ok=True)
        made = self._shared_key.with_suffix(f".{os.urandom(4).hex()}")
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "w") as f:
            f.write(text)
        made.rename(self._shared_key)
        return text

    def _await_shared_key(self, within: float) -> str:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            try:
                with open(os.open(self._shared_key, os.O_RDONLY | os.O_NOFOLLOW)) as f:
                    found = os.fstat(f.fileno())
                    if found.st_uid == os.getuid() and not found.st_mode & 0o077:
                        return f.read()
            except OSError:
                pass
            time.sleep(0.1)
        raise ConfigError(
            f"run_dir: {self.path} is not shared by all nodes (no key appeared there within {within:g} s); give "
            "--run-dir on a shared file system, or have the TorchPass plugin installed"
        )

    def socket(self, node: int) -> str:
        path = self._private / "socket"
        path.unlink(missing_ok=True)
        return str(path)

    def close(self) -> None:
        shutil.rmtree(self._private, ignore_errors=True)
        if self._coordinating:
            try:
                self._shared_key.unlink(missing_ok=True)
            except OSError:
                pass


class SlurmRun(host.Host):
    """The launcher of one node."""

    def __init__(
        self,
        job: Job,
        step: Step,
        command: Command,
        environment: Mapping[str, str],
        rundir: StepDir,
        quiet: bool,
        key: bytes,
        coordinating: int,
        batch: int | None,
    ) -> None:
        secret = {KEY, verdict.VARIABLE}
        visible = {name: value for name, value in environment.items() if name not in secret}
        super().__init__(command, visible, rundir, job.failure_timeout, quiet)
        self.job = job
        self.step = step
        self.key = key
        self.coordinating = coordinating
        self.batch = batch
        self.has_plugin = KEY in environment
        self.verdict_file = environment.get(verdict.VARIABLE)
        self._door = Door(rundir.key_file.parent / "tasks")
        self._signalled: signal.Signals | None = None
        self._reporter: asyncio.WriteTransport | None = None
        self._told = asyncio.Event()

    async def run(self) -> int:
        code = await super().run()
        await self._door.close(code)
        return code

    def listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in signals.ALL:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        """Slurm tells all processes of a job at once; whoever tells this one alone means the job, too."""
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            return  # the script may make use of it; if it ends by it, so does the job (supervisor)
        self._signalled = number
        if self.coordinator is not None:
            self.coordinator.stop(number.name)
        elif self.supervisors:
            for pid in self.supervisors.values():
                processes.send_signal(pid, number)
        elif self.forge is not None:
            processes.send_signal(self.forge.pid, signal.SIGKILL)

    def stopped_before_start(self) -> int | None:
        return None if self._signalled is None else 128 + self._signalled

    async def work(self) -> int:
        places = [Place.of_this_task(0)]
        places += await self._door.places(self.step.tasks_per_node - 1, self.timeouts.join)
        if len(places) < self.step.tasks_per_node:
            raise StartError(f"only {len(places)} of the {self.step.tasks_per_node} tasks of {self.step.name} started")
        devices = all_devices(places)
        if devices is not None:
            self.env["CUDA_VISIBLE_DEVICES"] = devices
        others = [name for name in self.step.names if name != self.step.name]
        coordinator = self.step.names[self.coordinating]
        peer = coordinator if coordinator in others else (others or [self.step.name])[0]
        address = own_address(self.step.name, peer)
        if self.step.node == self.coordinating:
            code = await self._coordinate(address, cpus_by_slot(places))
            if self.verdict_file is not None:
                verdict.leave(Path(self.verdict_file), code)
            return code
        self.forge = Forge.start(None, self.command.python is not None, self.env)
        await self._fork(address, cpus_by_slot(places))
        await self.alone.wait()
        code = self.exit_codes[self.step.node]
        if code < 0:
            self.say(f"node {self.step.name}: its supervisor was killed", always=True)
            return 1
        if code == COORDINATOR_LOST:
            where = self.step.names[self.coordinating]
            self.say(f"node {self.step.name} ends: the coordinator is lost (it was on {where})", always=True)
        return code

    async def _coordinate(self, address: str, cpus: list[list[int]]) -> int:
        self._introduce()
        await self._start_reporter()
        try:
            self.forge = Forge.start(address, self.command.python is not None, self.env)
            store = f"{address}:{await self.forge.store_port()}"
            run_id = f"torchpass-{self.step.tag}"
            coordinator = Coordinator(self.job, self.key, store, self.rundir.path, self._tell, run_id=run_id)
            await coordinator.start("0.0.0.0", ports(self.key))
            await self._fork(address, cpus)
            self.coordinator = coordinator
            if self._signalled is not None:
                coordinator.stop(self._signalled.name)
            return await self.coordinate(coordinator)
        finally:
            await self._end_reporter()

    async def _fork(self, address: str, cpus: list[list[int]]) -> None:
        assert self.forge is not None
        step = self.step
        spec = NodeSpec(
            node=step.node,
            slots=self.job.nproc_per_node,
            warm=self.job.warm,
            host=address,
            coordinator=(step.names[self.coordinating], ports(self.key)),
            connect_within=self.timeouts.join,
            key_file=str(self.rundir.key_file),
            run_dir=str(self.rundir.path),
            log_dir=str(self.rundir.log_dir),
            socket=self.rundir.socket(step.node),
            failure_timeout=self.job.failure_timeout,
            command=self.command,
            env=self.env,
            cpus=cpus,
            # srun sees the file system of its own host at least; the coordinating launcher writes it, too.
            verdict_file=self.verdict_file if step.node == self.batch else None,
            slurm=True,
            name=step.name,
            block=step.block,
            vital=self._vital(),
            sick=_sickness(step),
        )
        (pid,) = await self.forge.fork([spec])
        self.watch(step.node, pid)

    def _vital(self) -> str:
        runs = [(self.batch, "the batch script"), (self.coordinating, "the coordinator")]
        return " and ".join(what for node, what in runs if node == self.step.node)

    # --- what people and Slurm are told -------------------------------------------------------------------

    def _introduce(self) -> None:
        shape = story.shape(self.job.nodes, self.job.spares, self.job.nproc_per_node)
        self.say(f"job {self.step.job_id}: {shape}: {shlex.join(self.command.argv)}")
        self.say(f"logs: {self.rundir.log_dir}/rank*.log   events: torchpass events {self.rundir.path}")
        if not self.has_plugin:
            self.say(
                "warning: the TorchPass plugin is not active in this srun. Give srun --no-kill --kill-on-bad-exit=0 "
                "--wait=0, or Slurm ends the step with the first node; srun's exit code is not the job's"
            )
        if not helper.address(self.step.job_id, self.step.name).exists():
            self.say("warning: there is no node helper here, so a lost node is not drained: see torchpass doctor")

    async def _start_reporter(self) -> None:
        task = reporter.Task(
            self.step.slurm_id, list(self.step.names), str(helper.address(self.step.job_id, self.step.name))
        )
        process = subprocess.Popen(
            module_command("tpwrap.slurm.reporter", msgspec.json.encode(task).decode()),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self.watch_process(process.pid, self._told)
        process.returncode = 0  # our reaper waits for it
        self._reporter, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, process.stdin)

    def _tell(self, event: events.Event) -> None:
        self.on_event(event)
        if self._reporter is not None and not self._reporter.is_closing():
            self._reporter.write(events.to_line(event, time.time()))

    async def _end_reporter(self) -> None:
        if self._reporter is None:
            return
        self._reporter.close()
        try:
            await asyncio.wait_for(self._told.wait(), _TELL)
        except asyncio.TimeoutError:
            self.say("Slurm does not answer: the end of the job is not in its comment")


def _sickness(step: Step) -> str:
    """What the prolog's health check found on this node."""
    try:
        text = (helper.RUN / f"job{step.job_id}.{step.name}.sick").read_text(errors="replace")
    except OSError:
        return ""
    return " ".join(text.split())[:200] or "unhealthy"


def _take_out(step: Step, coordinating: int) -> None:
    """Drain the coordinator's node and set it down, if it is dead: nobody else will, and srun waits for its tasks until
    Slurm has noticed by itself. The first few of the others are enough; the helper takes it once."""
    others = [node for node in range(len(step.names)) if node != coordinating][:3]
    name = step.names[coordinating]
    if step.node not in others or probe.answers(name):
        return
    path = helper.address(step.job_id, step.name)
    for verb in ("drain", "down"):
        try:
            helper.ask(path, verb, name, "the coordinator was lost with this node")
        except SlurmError as e:
            log.warning("node %s is not set %s: %s", name, verb, e)


def _tell_and_log(text: str) -> None:
    os.write(2, f"torchpass: {text}\n".encode())
    log.warning("%s", text)  # srun, which would show the line, is most likely gone

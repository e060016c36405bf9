"""`tpwrap --rehearse`: before the real run, a few updates twice, one time with a failure. Are they equal to the bit?

Each of the two runs is a job of its own, in a child process and a directory of its own. Its workers write down what
they compute (`tpwrap.engine.script.trace`) and leave the script's files alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from tpwrap.core import events
from tpwrap.core.config import Config, ConfigError, Settings
from tpwrap.core.endings import INTERNAL
from tpwrap.core.job import Job
from tpwrap.launch import processes
from tpwrap.launch.command import recognise
from tpwrap.launch.config import make_job
from tpwrap.launch.interpreter import module_command
from tpwrap.launch.local import run_local
from tpwrap.report import table, traces

VARIABLE = "TORCHPASS_REHEARSE"
"""tells a worker that it is part of a rehearsal: "<updates>,<directory of the trace>" """
UPDATES = 6
FEWEST = 5
FAILURE = 3
"""updates that have been applied when the failure comes"""
_FAULT = f"rank=1 step={FAILURE} phase=backward kill"
_PATIENCE = 60.0
"""seconds that the second run may take beside ten times those of the first"""
_TAIL = 30
"""lines of output that are shown of a run that failed"""


class Task(msgspec.Struct, frozen=True):
    """One run, for the child process that makes it."""

    config: Config
    command: list[str]


class Ran(NamedTuple):
    """What one run has left."""

    directory: Path
    code: int
    """of the command; -1: it did not end in time"""
    seconds: float

    @property
    def output(self) -> str:
        return (self.directory / "output.txt").read_text(errors="replace")

    def events(self) -> list[events.Event]:
        return [event for _, event in table.read(self.directory / "run")]


def _check(job: Job, updates: int, environment: Mapping[str, str]) -> None:
    if VARIABLE in environment:
        raise ConfigError(f"{VARIABLE} is set: it is for the workers of a rehearsal; use the option --rehearse")
    if job.world_size < 2:
        raise ConfigError(
            "--rehearse needs two ranks or more: with one, nobody else has the weights. Give --nproc-per-node 2"
        )
    if updates < FEWEST:
        raise ConfigError(
            f"--rehearse-steps {updates} is too few: the failure comes after {FAILURE} updates; give {FEWEST} or more"
        )


def rehearse(
    settings: Settings, job: Job, command: Sequence[str], environment: Mapping[str, str], updates: int | None
) -> int:
    """Rehearse; 0: a failure changes nothing. Else the exit code, and the user has been told what differs.

    70 where the two runs differ or the healing failed, the script's own where it fails without a failure of ours.
    Raises ConfigError where a rehearsal could prove nothing. updates: None for the default.
    """
    updates = UPDATES if updates is None else updates
    _check(job, updates, environment)
    scratch = Path(tempfile.mkdtemp(prefix="torchpass-rehearsal-"))
    show = _Show(settings.config.quiet)
    rehearsal = _Rehearsal(settings.config, job, list(command), environment, updates, scratch, show)
    with _Signals() as signals:
        code = rehearsal.run(signals)
    if code == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        show.error(f"what the two runs have left: {scratch}")
    return code


class _Rehearsal:
    def __init__(
        self,
        config: Config,
        job: Job,
        command: list[str],
        environment: Mapping[str, str],
        updates: int,
        scratch: Path,
        show: _Show,
    ) -> None:
        self._config = config
        self._job = job
        self._command = command
        self._environment = environment
        self._updates = updates
        self._scratch = scratch
        self._show = show

    def run(self, signals: _Signals) -> int:
        began = time.monotonic()
        with self._show.working(f"{self._updates} updates, undisturbed"):
            calm = self._make("undisturbed", [], signals, None)
        if (stopped := signals.exit_code()) is not None:
            return stopped
        if calm.code != 0:
            return self._failed(calm, "the script fails without any failure of ours", calm.code)
        text = f"{self._updates} updates, rank 1 killed in the backward pass of step {FAILURE}"
        with self._show.working(text):
            hit = self._make("failure", [_FAULT], signals, _PATIENCE + 10 * calm.seconds)
        if (stopped := signals.exit_code()) is not None:
            return stopped
        if hit.code < 0:
            return self._failed(hit, f"the run with a failure stood still and was ended after {hit.seconds:.0f} s")
        if hit.code != 0:
            return self._failed(hit, f"the run with a failure ended with exit code {hit.code}")
        return self._compare(calm, hit, time.monotonic() - began)

    def _compare(self, calm: Ran, hit: Ran, seconds: float) -> int:
        if not any(isinstance(event, events.FailoverFinished) for event in hit.events()):
            self._show.error(
                f"nothing was healed, because the script did not get to the backward pass of step {FAILURE}: it must "
                f"make at least {FAILURE + 1} updates to be rehearsed"
            )
            return INTERNAL
        try:
            ours, theirs = (traces.read(run.directory / "trace") for run in (calm, hit))
        except traces.ResultError as e:
            self._show.error(f"NOT equal: {e}")
            return INTERNAL
        result = traces.compare(ours, theirs, self._job.world_size, FAILURE)
        if result.difference is not None:
            self._show.error(f"NOT equal: {result.difference} (undisturbed, and with a failure)")
            self._show.error(f"what to do: {traces.advice(result.difference, FAILURE, traces.has_session(ours))}")
            return INTERNAL
        if result.steps <= FAILURE:
            self._show.error("nothing was compared: no update after the failure was seen")
            return INTERNAL
        if result.left_out:
            self._show.line(f"not compared, since it differs without a failure, too: {', '.join(result.left_out)}")
        self._show.line(
            f"equal to the bit: {self._job.world_size} ranks, {result.steps} updates, one failure healed "
            f"({seconds:.1f} s in all)"
        )
        return 0

    def _failed(self, run: Ran, what: str, code: int = INTERNAL) -> int:
        lines = run.output.rstrip("\n").splitlines()[-_TAIL:]
        self._show.raw("".join(f"  {line}\n" for line in lines))
        self._show.error(f"{what}; the end of its output is above")
        return code

    def _make(self, name: str, faults: list[str], signals: _Signals, limit: float | None) -> Ran:
        """Run the job once. limit: seconds it may take."""
        directory = self._scratch / name
        (directory / "trace").mkdir(parents=True)
        config = msgspec.structs.replace(
            self._config,
            inject=faults,
            inject_file=None,
            run_dir=str(directory / "run"),
            log_dir=None,
            strict=False,  # the real run sees to that
            quiet=True,
        )
        task = msgspec.json.encode(Task(config, self._command)).decode()
        began = time.monotonic()
        with (directory / "output.txt").open("wb") as output:
            child = subprocess.Popen(
                module_command("tpwrap.launch.rehearsal", task),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._environment, VARIABLE: f"{self._updates},{directory / 'trace'}"},
                start_new_session=True,  # of a Ctrl-C it is told by us
            )
        code = signals.wait(child, limit)
        return Ran(directory, code, time.monotonic() - began)


class _Signals(AbstractContextManager["_Signals"]):
    """Passes the signals that end a job on to the run that goes on."""

    def __init__(self) -> None:
        self._code: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # nohup
                self._before[number] = before
                signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def wait(self, child: subprocess.Popen[bytes], limit: float | None) -> int:
        """The exit code of `child`; -1 where it took longer than `limit` seconds and was ended."""
        self._child = child
        if self._code is not None:
            child.terminate()
        try:
            return child.wait(limit)
        except subprocess.TimeoutExpired:
            child.terminate()
            child.wait()
            return -1
        finally:
            self._child = None

    def exit_code(self) -> int | None:
        """Of the command, if a signal has come."""
        return self._code

    def _came(self, number: int, frame: FrameType | None) -> None:
        self._code = 128 + number
        if self._child is not None:
            self._child.send_signal(number)


class _Show:
    """What the user sees of a rehearsal: where standard error is a terminal, a line that moves while a run goes on."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._quiet = quiet

    def line(self, text: str) -> None:
        if not self._quiet:
            self.error(text)

    def error(self, text: str) -> None:
        self._console.print(Text(f"torchpass: rehearsal: {text}"))

    def raw(self, text: str) -> None:
        self._console.print(Text(text), end="")

    def working(self, text: str) -> AbstractContextManager[object]:
        self.line(text)
        if self._quiet or not self._console.is_terminal:
            return nullcontext()
        return self._console.status("")


def main(arguments: list[str]) -> int:
    """The child process: make one run."""
    processes.die_with_parent(os.getppid())
    task = msgspec.json.decode(arguments[0], type=Task)
    settings = Settings(task.config, {})
    try:
        return run_local(settings, make_job(settings), recognise(task.command), os.environ)
    except ConfigError as e:
        sys.stderr.write(f"tpwrap: {e}\n")
        return 2

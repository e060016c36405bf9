"""Runs the real `tpwrap` and looks for what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tpwrap.core import events

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ["env", f"PYTHONPATH={ROOT}", sys.executable, str(ROOT / "tests/launch/standin.py")]
_MARK = "TPWRAP_TEST_MARK"


class Run:
    """One `tpwrap` process with everything below it, found by a mark in the environment."""

    def __init__(
        self, tmp_path: Path, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.dir = tmp_path / "run"
        self.mark = uuid.uuid4().hex
        self.output = tmp_path / "output"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHPASS_")}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tpwrap", "--run-dir", str(self.dir), *arguments],
                env={**clean, "PYTHONPATH": str(ROOT), _MARK: self.mark, **(env or {})},
                cwd=cwd or tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout: float = 60) -> int:
        """The exit code. On a time-out everything is killed and the output shown."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"tpwrap did not end in {timeout:g} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def events(self) -> list[events.Event]:
        lines = (self.dir / "events.jsonl").read_bytes().splitlines()
        return [events.from_line(line)[1] for line in lines]

    def log(self, name: str) -> str:
        return (self.dir / "logs" / f"{name}.log").read_text()

    def pids(self) -> list[int]:
        """All living processes of the run, the launcher included. Zombies have no environment any more."""
        mark = f"{_MARK}={self.mark}".encode()
        everything = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in everything if mark in proc(pid, "environ").split(b"\0")]

    def until(self, condition: Callable[[], object], what: str, timeout: float = 60) -> None:
        """Poll `condition` while the job runs."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                state = f"exit code {self.process.poll()}, output:\n{self.text()}"
                self.kill_all()
                raise AssertionError(f"waited in vain for {what}; {state}")
            time.sleep(0.02)

    def assert_nothing_left(self, timeout: float = 10) -> None:
        """Every process of the run is gone (soon: those of a killed launcher need a moment)."""
        deadline = time.monotonic() + timeout
        while left := self.pids():
            if time.monotonic() > deadline:
                named = "\n".join(describe(pid) for pid in left)
                self.kill_all()
                raise AssertionError(f"left behind:\n{named}\noutput:\n{self.text()}")
            time.sleep(0.02)

    def kill_all(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(10)


def proc(pid: int, name: str) -> bytes:
    """/proc/PID/NAME; nothing once the process has ended, which may be at any time."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def comm(pid: int) -> str:
    """The name that a process goes by."""
    return proc(pid, "comm").decode(errors="replace").strip()


def describe(pid: int) -> str:
    """pid, name, state and command line, for messages."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} {status[0]} {status[2]} {command[:200]}"

"""However a job is ended, no process of it is left, and the exit code says how."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import STANDIN, Run, proc

Start = Callable[..., Run]
ARGUMENTS = ["--nodes", "2", "--spares", "1", "--failure-timeout", "1", *STANDIN]


def ready(run: Run) -> None:
    run.until(lambda: run.text().count("incarnation 0") == 2, "both ranks")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_signal_ends_everything(number: signal.Signals, code: int, tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, "wait")
    ready(run)
    run.process.send_signal(number)
    assert run.wait(20) == code
    run.assert_nothing_left(0.5)
    assert run.text().count("ending the job") == 1
    assert "Traceback" not in run.text()


def test_worker_that_ignores_sigterm_is_killed(tpwrap: Start) -> None:
    stubborn = "trap '' TERM INT; exec " + " ".join(STANDIN) + " wait"
    run = tpwrap("--failure-timeout", "1", "bash", "-c", stubborn)
    run.until(lambda: "incarnation 0" in run.text(), "the rank")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(20) == 143
    run.assert_nothing_left(0.5)


def test_second_ctrl_c_kills_at_once(tpwrap: Start) -> None:
    stubborn = "trap '' TERM INT; exec " + " ".join(STANDIN) + " wait"
    run = tpwrap("--failure-timeout", "60", "bash", "-c", stubborn)
    run.until(lambda: "incarnation 0" in run.text(), "the rank")
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "ending the job" in run.text(), "the first answer")
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(10) == 130
    run.assert_nothing_left(0.5)


def test_killed_launcher_takes_everything_along(tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, "wait")
    ready(run)
    assert len(run.pids()) > 6
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    run.assert_nothing_left(10)


@pytest.mark.parametrize("delay", [0.1, 0.5, 1.5, 3.0])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_while_it_starts(delay: float, number: signal.Signals, tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, "wait")
    time.sleep(delay)
    run.process.send_signal(number)
    # Very early, Python itself answers the signal (by a KeyboardInterrupt, or by dying of it).
    assert run.wait(30) in {signal.SIGINT: (130, 1, -2), signal.SIGKILL: (-9,)}[number]
    run.assert_nothing_left(15)


def test_ctrl_z_does_not_end_the_job(tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, "wait")
    ready(run)
    run.process.send_signal(signal.SIGTSTP)
    run.until(lambda: "Ctrl-Z has no effect" in run.text(), "the answer")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(20) == 130


def test_run_directory_is_private_and_its_key_does_not_stay(tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, "wait")
    ready(run)
    assert run.dir.stat().st_mode & 0o777 == 0o700
    assert (run.dir / "key").stat().st_mode & 0o777 == 0o600
    key = (run.dir / "key").read_text()
    assert len(bytes.fromhex(key)) == 32
    for pid in run.pids():  # neither in a command line nor in an environment
        for name in ("cmdline", "environ"):
            assert key.encode() not in proc(pid, name)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(20) == 130
    left = {name for name in os.listdir(run.dir) if not name.startswith("came")}
    assert left == {"events.jsonl", "launcher.log", "logs", "node0", "node1", "node2"}


def test_a_run_directory_that_was_there_keeps_its_mode_and_the_secrets_in_it_are_private(
    tpwrap: Start, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    given.chmod(0o755)
    (given / "key").write_text("of an earlier run that was killed")
    (given / "key").chmod(0o644)
    (given / "node1").mkdir(mode=0o755)
    run = tpwrap("--run-dir", str(given), *ARGUMENTS, "wait")
    ready(run)
    assert given.stat().st_mode & 0o777 == 0o755
    assert (given / "key").stat().st_mode & 0o777 == 0o600
    sockets = list(given.rglob("socket"))
    assert {path.parent.name for path in sockets} == {"node0", "node2"}  # others can enter node1
    assert all(path.parent.stat().st_mode & 0o777 == 0o700 for path in sockets)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(20) == 130
    assert not (given / "key").exists()

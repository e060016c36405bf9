"""The supervisor outlives its worker, however that ends, and puts another one in its place.

The workers are stand-ins that speak the protocol without torch, so that these tests are about processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import STANDIN, Run, comm, proc

from tpwrap.core import events
from tpwrap.launch import processes

Start = Callable[..., Run]
ARGUMENTS = ["--nodes", "2", "--spares", "1", "--failure-timeout", "1"]


def supervisors(run: Run) -> dict[int, int]:
    return {event.node: event.pid for event in run.events() if isinstance(event, events.NodeJoined)}


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (["exit", "0"], "exit code 0"),
        (["exit", "3"], "exit code 3"),
        (["signal", str(int(signal.SIGKILL))], "killed by"),
        (["signal", str(int(signal.SIGSEGV))], "killed by"),
        (["signal", str(int(signal.SIGSTOP))], "stopped for too long"),
        (["raise"], "ValueError: boom"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_survives_every_ending(ending: list[str], words: str, tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, *STANDIN, *ending)
    assert run.wait() == 0, run.text()
    story = run.events()
    failed = [event for event in story if isinstance(event, events.RankFailed)]
    assert [(event.rank, event.node) for event in failed] == [(0, 0)]
    assert words in failed[0].cause
    assert not [event for event in story if isinstance(event, events.NodeDown)]
    # Healed in its own slot, by a process of the same supervisor.
    finished = [event for event in story if isinstance(event, events.FailoverFinished)]
    assert [(move.rank, move.to_node, move.same_slot) for move in finished[0].moves] == [(0, 0, True)]
    assert "torchpass: rank 0 failed (last heard of at step 1)" in run.text()
    assert "torchpass: rank 0 goes on in its own slot; training resumed at step 1 after" in run.text()


def test_what_a_dead_worker_leaves_is_killed(tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, *STANDIN, "children")

    def sleeping() -> list[int]:
        return [pid for pid in run.pids() if comm(pid) == "sleep"]

    assert run.wait() == 0, run.text()
    assert "children started" in run.log("rank0")
    assert not sleeping()


def test_warm_workers_wait_in_every_slot(tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, "--nproc-per-node", "2", *STANDIN, "wait")
    # 4 ranks, a warm one beside each, and the spare node's two.
    run.until(lambda: len(standins(run)) == 10, "10 workers")
    time.sleep(0.5)
    assert len(standins(run)) == 10
    victim = next(pid for pid in standins(run))
    os.kill(victim, signal.SIGKILL)
    run.until(lambda: victim not in standins(run) and len(standins(run)) == 10, "a new one")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def test_no_warm_keeps_none_beside_ranks(tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, "--no-warm", *STANDIN, "wait")
    run.until(lambda: len(standins(run)) == 3, "3 workers")
    time.sleep(0.5)
    assert len(standins(run)) == 3
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


def test_lost_supervisor_takes_its_node_along(tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, *STANDIN, "wait")
    run.until(lambda: len(standins(run)) == 5, "5 workers")
    node = supervisors(run)[1]
    group = [pid for pid in run.pids() if os.getpgid(pid) == node]
    assert len(group) == 4  # supervisor, zygote, rank 1, its warm process
    os.kill(node, signal.SIGKILL)
    run.until(lambda: "node 2 takes over rank 1 from node 1" in run.text(), "the failover")
    # They have got SIGKILL by now, and a process on a busy machine needs a moment to be gone.
    run.until(lambda: not [pid for pid in group if processes.state(pid) not in ("", "Z")], "the end of the node", 5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def test_halted_node_is_lost_and_fenced(tpwrap: Start) -> None:
    run = tpwrap(*ARGUMENTS, *STANDIN, "wait")
    run.until(lambda: len(standins(run)) == 5, "5 workers")
    node = supervisors(run)[0]
    os.killpg(node, signal.SIGSTOP)
    run.until(lambda: "node 2 takes over rank 0 from node 0" in run.text(), "the failover")
    run.until(lambda: processes.state(node) == "", "the end of the halted node")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def zygotes(run: Run, node: int = 0) -> list[int]:
    return [pid for pid in run.pids() if comm(pid) == f"tp-zygote{node}" and processes.state(pid) != "Z"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_zygote_is_replaced_before_it_is_needed(number: signal.Signals, tpwrap: Start) -> None:
    run = tpwrap("--failure-timeout", "1", *STANDIN, "wait")
    run.until(lambda: len(standins(run)) == 2, "2 workers")
    [zygote] = zygotes(run)
    before = standins(run)
    os.kill(zygote, number)
    run.until(lambda: zygotes(run) not in ([], [zygote]), "another zygote")
    assert standins(run) == before
    os.kill(before[-1], signal.SIGKILL)
    run.until(lambda: len(standins(run)) == 2 and standins(run) != before, "a new worker")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def test_zygote_that_is_lost_again_and_again_is_replaced_in_the_end(tpwrap: Start) -> None:
    run = tpwrap("--failure-timeout", "1", *STANDIN, "wait")
    run.until(lambda: len(standins(run)) == 2, "2 workers")
    for _ in range(3):
        run.until(lambda: zygotes(run), "a zygote")
        for pid in zygotes(run):
            os.kill(pid, signal.SIGKILL)
    before = standins(run)
    os.kill(before[-1], signal.SIGKILL)
    run.until(lambda: len(standins(run)) == 2 and standins(run) != before, "a new worker")
    assert "cannot start a worker" not in run.text()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def test_command_that_always_dies_ends_the_job_with_its_code(tpwrap: Start) -> None:
    run = tpwrap("--nodes", "2", "--spares", "1", "bash", "-c", "echo before; exit 7")
    assert run.wait(30) == 7
    assert "3 in a row ended before they were ready (the last exited with code 7)" in run.text()
    assert "exit code 7: the command never becomes a worker" in run.text()
    assert run.text().count("before") >= 9


def test_slot_that_brings_nobody_up_is_left_at_once(tpwrap: Start, tmp_path: Path) -> None:
    """The rank's process dies, and the command cannot be run any more on its node."""
    standin = " ".join(STANDIN)
    broken = tmp_path / "broken"
    script = f"[ $TORCHPASS_NODE = 0 ] && [ -e {broken} ] && exit 7; exec {standin} wait"
    run = tpwrap("--nodes", "2", "--spares", "1", "--no-warm", "bash", "-c", script)
    run.until(lambda: run.text().count("incarnation 0") == 2, "both ranks")
    broken.touch()
    os.kill(next(e.pid for e in run.events() if isinstance(e, events.WorkerAssigned) and e.rank == 0), signal.SIGKILL)
    run.until(lambda: "node 2 takes over rank 0 from node 0" in run.text(), "the move", 30)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def standins(run: Run) -> list[int]:
    def script(pid: int) -> bytes:
        return b"".join(proc(pid, "cmdline").split(b"\0")[1:2])

    return sorted(pid for pid in run.pids() if script(pid).endswith(b"standin.py"))

"""A supervisor that is started as a program of its own, as a cluster does it: no template, its own zygote."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
from running import ROOT, STANDIN

from tpwrap.control.coordinator import Coordinator, Verdict
from tpwrap.core import events
from tpwrap.core.job import Job
from tpwrap.launch.command import Command
from tpwrap.launch.interpreter import job_environment, module_command
from tpwrap.launch.node import NodeSpec

LOSSY = """
import sys, time
from tpwrap.launch import supervisor, zygote

ask, lost = zygote.request, []

def request(sock, what, stdout, stderr):
    reply = ask(sock, what, stdout, stderr)
    if isinstance(what, zygote.Spawn) and not lost:
        lost.append(reply.pid)
        time.sleep(1)  # the worker connects and says that it is warm
        raise zygote.ZygoteLost("killed before it could reply")
    return reply

zygote.request = request
sys.exit(supervisor.main(sys.argv[1:]))
"""


def run_job(tmp_path: Path, *command: str, late_spare: bool = False) -> tuple[Verdict, int]:
    """One rank, by a supervisor that `command` starts; the verdict, and the supervisor's exit code. late_spare: another
    supervisor joins later, and no rank is given out before."""
    key = os.urandom(32)
    (tmp_path / "key").write_text(key.hex())

    def spec(node: int, port: int) -> str:
        path = tmp_path / f"spec{node}.json"
        path.write_bytes(
            msgspec.json.encode(
                NodeSpec(
                    node=node,
                    slots=1,
                    warm=False,
                    host="127.0.0.1",
                    coordinator=("127.0.0.1", [port]),
                    connect_within=5,
                    key_file=str(tmp_path / "key"),
                    run_dir=str(tmp_path),
                    log_dir=str(tmp_path / "logs"),
                    socket=str(tmp_path / f"socket{node}"),
                    failure_timeout=5,
                    command=Command(["/usr/bin/env", *STANDIN[1:], "finish"], None, "for the test"),
                    env=job_environment(os.environ),
                )
            )
        )
        return str(path)

    async def main() -> tuple[Verdict, int]:
        coordinator = Coordinator(Job(nodes=1, spares=int(late_spare), failure_timeout=5), key, "h:1", tmp_path)
        port = await coordinator.start("127.0.0.1")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        started = [await asyncio.create_subprocess_exec(*command, spec(0, port), start_new_session=True, env=env)]
        try:
            running = asyncio.create_task(coordinator.run())
            if late_spare:
                await asyncio.sleep(3)
                usual = module_command("tpwrap.launch.supervisor", spec(1, port))
                started.append(await asyncio.create_subprocess_exec(*usual, start_new_session=True, env=env))
            verdict = await asyncio.wait_for(running, 30)
            return verdict, await asyncio.wait_for(started[0].wait(), 20)
        finally:
            for supervisor in started:
                if supervisor.returncode is None:
                    os.killpg(supervisor.pid, signal.SIGKILL)

    return asyncio.run(main())


def test_supervisor_without_template(tmp_path: Path) -> None:
    verdict, code = run_job(tmp_path, *module_command("tpwrap.launch.supervisor"))
    assert (verdict.exit_code, code) == (0, 0)
    assert "incarnation 0" in (tmp_path / "logs" / "rank0.log").read_text()
    assert not (tmp_path / "socket0").exists()


def test_worker_whose_zygote_was_lost_before_it_could_reply_is_nobody(tmp_path: Path) -> None:
    """It has connected by then and counts as warm; the rank must go to its successor."""
    verdict, code = run_job(tmp_path, sys.executable, "-c", LOSSY, late_spare=True)
    assert (verdict.exit_code, code) == (0, 0), verdict
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assigned = [event for _, event in map(events.from_line, lines) if isinstance(event, events.WorkerAssigned)]
    assert assigned[-1].worker == "n0s0w1"

"""A supervisor that is started as a program of its own, as a cluster does it: no template, its own zygote."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
from running import STANDIN

from tpwrap.control.coordinator import Coordinator, Verdict
from tpwrap.core.job import Job
from tpwrap.launch.command import Command
from tpwrap.launch.interpreter import job_environment, module_command
from tpwrap.launch.node import NodeSpec


def test_supervisor_without_template(tmp_path: Path) -> None:
    key = os.urandom(32)
    (tmp_path / "key").write_text(key.hex())

    async def main() -> tuple[Verdict, int]:
        coordinator = Coordinator(Job(nodes=1, failure_timeout=5), key, "127.0.0.1:1", tmp_path)
        port = await coordinator.start("127.0.0.1")
        spec = NodeSpec(
            node=0,
            slots=1,
            warm=False,
            host="127.0.0.1",
            coordinator=("127.0.0.1", [port]),
            connect_within=5,
            key_file=str(tmp_path / "key"),
            run_dir=str(tmp_path),
            log_dir=str(tmp_path / "logs"),
            socket=str(tmp_path / "socket"),
            failure_timeout=5,
            command=Command(["/usr/bin/env", *STANDIN[1:], "finish"], None, "for the test"),
            env=job_environment(os.environ),
        )
        (tmp_path / "spec.json").write_bytes(msgspec.json.encode(spec))
        supervisor = await asyncio.create_subprocess_exec(
            *module_command("tpwrap.launch.supervisor", str(tmp_path / "spec.json")), start_new_session=True
        )
        verdict = await asyncio.wait_for(coordinator.run(), 60)
        return verdict, await asyncio.wait_for(supervisor.wait(), 20)

    verdict, code = asyncio.run(main())
    assert (verdict.exit_code, code) == (0, 0)
    assert "incarnation 0" in (tmp_path / "logs" / "rank0.log").read_text()
    assert not (tmp_path / "socket").exists()

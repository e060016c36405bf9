"""What a supervisor is told when it starts."""

from __future__ import annotations

import msgspec

from tpwrap.launch.command import Command


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a job.

    coordinator: host and the ports it may listen on; connect_within: how long to look for it, in seconds.
    host: address of this node, on which its servers listen.
    socket: path of the unix socket that its workers connect to.
    warm: keep a warm process beside each rank too.
    env: the environment of workers, before what is theirs alone is added. cpus: for each slot, the processors
    that its workers may use; empty: all.
    verdict_file: where the job's exit code is left for Slurm's step.
    slurm: under Slurm, a signal to a process of a node is meant for the whole job.
    name, block, vital, sick: see `tpwrap.control.messages.Hello`.
    """

    node: int
    slots: int
    warm: bool
    host: str
    coordinator: tuple[str, list[int]]
    connect_within: float
    key_file: str
    run_dir: str
    log_dir: str
    socket: str
    failure_timeout: float
    command: Command
    env: dict[str, str]
    cpus: list[list[int]] = []
    verdict_file: str | None = None
    slurm: bool = False
    name: str = ""
    block: str = ""
    vital: str = ""
    sick: str = ""

"""What a supervisor is told when it starts."""

from __future__ import annotations

import msgspec

from tpwrap.launch.command import Command


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a job.

    coordinator: host and port. host: address of this node, on which its servers listen.
    socket: path of the unix socket that its workers connect to.
    spare: holds no rank at first. warm: keep a warm process beside each rank too.
    env: the environment of workers, before what is theirs alone is added.
    """

    node: int
    slots: int
    spare: bool
    warm: bool
    host: str
    coordinator: tuple[str, int]
    key_file: str
    run_dir: str
    log_dir: str
    socket: str
    failure_timeout: float
    command: Command
    env: dict[str, str]

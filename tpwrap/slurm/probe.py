"""Whether a node is there at all, asked without Slurm, which takes minutes to notice."""

from __future__ import annotations

import socket

from tpwrap.slurm import commands
from tpwrap.slurm.commands import SlurmError

_PATIENCE = 2.0
_DEFAULT_PORT = 6818


def answers(node: str) -> bool:
    """Whether the node's slurmd takes connections. A process that has ended alone leaves it be."""
    try:
        socket.create_connection((node, _port()), _PATIENCE).close()
    except OSError:
        return False
    return True


def _port() -> int:
    try:
        for line in commands.run(["scontrol", "show", "config"]).splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "SlurmdPort":
                return int(value)
    except (SlurmError, ValueError):
        pass
    return _DEFAULT_PORT

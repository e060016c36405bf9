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
        return int(commands.config().get("SlurmdPort", _DEFAULT_PORT))
    except (SlurmError, ValueError):
        return _DEFAULT_PORT

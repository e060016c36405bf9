"""How our own helper processes are started, and what every process of a run has in its environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

_START = Path(__file__).resolve().parent / "start" / "torchpass.py"


def module_command(module: str, *arguments: str) -> list[str]:
    """Call `main(arguments)` of one of our modules in a new interpreter.

    Unlike with `python -m` the current directory is not on sys.path: a user's logging.py beside train.py must
    not end up in our processes.
    """
    return [sys.executable, "-u", str(_START), module, *arguments]


def job_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of all processes of a run.

    One hash seed for all: a set of strings iterates in the same order in a rank and in the process that
    replaces it. One thread a process unless the user says otherwise, as torchrun does.
    """
    env = dict(base)
    env.setdefault("PYTHONHASHSEED", "0")
    env.setdefault("OMP_NUM_THREADS", "1")
    return env

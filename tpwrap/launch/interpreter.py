"""How our own helper processes are started, and what every process of a run has in its environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import tpwrap

_START = """\
import importlib, sys
if sys.path and sys.path[0] == "":
    del sys.path[0]
root, module = sys.argv.pop(1), sys.argv.pop(1)
try:
    import tpwrap
except ImportError:
    sys.path.append(root)
sys.exit(importlib.import_module(module).main(sys.argv[1:]))
"""


def module_command(module: str, *arguments: str) -> list[str]:
    """Call `main(arguments)` of one of our modules in a new interpreter. Unlike `python -m`, without the current
    directory on sys.path: a user's logging.py beside train.py must not end up in our processes."""
    root = str(Path(tpwrap.__file__).resolve().parent.parent)
    return [sys.executable, "-u", "-c", _START, root, module, *arguments]


def job_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of all processes of a run.

    One hash seed for all: a set of strings iterates in the same order in a rank and in the process that
    replaces it. One thread a process unless the user says otherwise, as torchrun does.
    """
    env = dict(base)
    env.setdefault("PYTHONHASHSEED", "0")
    env.setdefault("OMP_NUM_THREADS", "1")
    return env

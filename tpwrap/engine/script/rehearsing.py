"""A process that is part of a rehearsal: it computes as always, and leaves the script's files alone."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tpwrap.engine.script import trace
from tpwrap.engine.script.files import is_script_file
from tpwrap.engine.script.outputs import Outputs

_open, _lstat = os.open, os.lstat
_WRITES = os.O_WRONLY | os.O_RDWR
_CHUNK = 1 << 20


def prepare(rank: int, two_lines: bool) -> None:
    """Before the script starts; nothing happens where this is no rehearsal.

    Generators that start differently in every process are seeded, so that a script which uses them unseeded computes
    the same twice (torch's start with a fixed seed). What the script writes to files goes nowhere. two_lines: nobody
    else has put its output under observation.
    """
    if not trace.rehearsing():
        return
    random.seed(rank)
    np.random.seed(rank)
    divert(trace.directory() / f"files{rank}")
    if two_lines:
        Outputs(run_dir=os.environ.get("TORCHPASS_RUN_DIR")).install()
        trace.speak()


def divert(place: Path) -> None:
    """Where the script opens a file for writing by os.open, it gets a copy of it in the directory `place`."""
    place.mkdir(exist_ok=True)

    @functools.wraps(_open)
    def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        file = sys._getframe(1).f_code.co_filename
        if not flags & _WRITES or dir_fd is not None or isinstance(path, int) or not is_script_file(file):
            return _open(path, flags, mode, dir_fd=dir_fd)
        real = os.path.abspath(os.fsdecode(path))
        copy = place / hashlib.sha256(os.fsencode(real)).hexdigest()
        there = _kind(real)
        if there not in (0, stat.S_IFREG) or (flags & os.O_EXCL and there) or not (flags & os.O_CREAT or there):
            if not copy.exists():
                return _open(path, flags, mode)  # a device, or an error
        elif there and not copy.exists():
            _copy(real, copy)
        return _open(copy, flags | os.O_CREAT, mode)

    os.open = open


def _copy(real: str, copy: Path) -> None:
    """By system calls alone: shutil's copies are output of the script, too."""
    source, target = (
        _open(real, os.O_RDONLY | os.O_CLOEXEC),
        _open(copy, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600),
    )
    try:
        while data := os.read(source, _CHUNK):
            os.write(target, data)
    finally:
        os.close(source)
        os.close(target)


def _kind(path: str) -> int:
    """The type bits of a file's mode; 0 where there is none."""
    try:
        return stat.S_IFMT(_lstat(path).st_mode)
    except OSError:
        return 0

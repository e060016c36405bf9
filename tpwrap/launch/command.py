"""What kind of command the user wants to run, decided before anything starts.

A worker that runs `python script.py …` or `python -m module …` with our own interpreter is forked from a
process that has imported torch already. Every other command is executed, and the engine comes in through
`tpwrap/launch/site/sitecustomize.py` when it reaches Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from tpwrap.core.config import ConfigError

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_HIDES_HOOK = {"I": "-I", "E": "-E", "S": "-S"}
_PROBE = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('tpwrap')))"


class Command(msgspec.Struct, frozen=True):
    """argv: the command, its program resolved to a path.

    python: what follows `python` if a worker can be forked, else None.
    reason: why it is started that way.
    """

    argv: list[str]
    python: list[str] | None
    reason: str


def recognise(
    argv: Sequence[str],
    *,
    executable: str = sys.executable,
    which: Callable[[str], str | None] = shutil.which,
    is_file: Callable[[str], bool] = os.path.isfile,
) -> Command:
    """Decide how `argv` is started; a command that cannot work is a ConfigError that says what to write."""
    program = argv[0]
    if program.endswith(".py"):
        # As torchrun does: a bare script runs in the interpreter of the launcher.
        return recognise([executable, *argv], executable=executable, which=which, is_file=is_file)
    path = which(program)
    if path is None:
        raise ConfigError(
            f"COMMAND {program!r}: no such program; write what you would type without tpwrap, "
            "for example: python train.py"
        )
    resolved = [path, *argv[1:]]
    if not _PYTHON.fullmatch(os.path.basename(program)):
        return Command(resolved, None, f"{program} is executed, the engine enters when it starts Python")
    options, rest = _split(list(argv[1:]))
    for letters in options:
        for letter, flag in _HIDES_HOOK.items():
            if letter in letters and not letters.startswith(("W", "X", "-")):
                raise ConfigError(f"COMMAND: python {flag} hides the start-up hook of TorchPass; leave {flag} out")
    if not rest:
        raise ConfigError("COMMAND: python without a script; for example: python train.py")
    if rest[0] not in ("-m", "-c") and not is_file(rest[0]):
        raise ConfigError(f"COMMAND: python cannot open {rest[0]!r} here: no such file")
    if rest[0] == "-m" and len(rest) < 2:
        raise ConfigError("COMMAND: python -m without a module; for example: python -m pkg.train")
    if rest[0] == "-c":
        return Command(resolved, None, "python -c is executed")
    if any(letters != "u" for letters in options):
        return Command(resolved, None, "python with options of its own is executed")
    if not same_interpreter(path, executable):
        return Command(resolved, None, f"{path} is not the interpreter of tpwrap ({executable})")
    return Command(resolved, rest, "forked from a process with torch imported")


def same_interpreter(path: str, executable: str) -> bool:
    """Same binary in the same directory: a virtual environment is told by where its link stands."""

    def identity(name: str) -> tuple[str, str]:
        return os.path.realpath(os.path.dirname(name)), os.path.realpath(name)

    return identity(path) == identity(executable)


def check_other_python(command: Command, executable: str = sys.executable) -> None:
    """A Python that is not ours must have torch and tpwrap: ask it, rather than fail in every worker."""
    program = command.argv[0]
    if command.python is not None or not _PYTHON.fullmatch(os.path.basename(program)):
        return
    if same_interpreter(program, executable):
        return
    probe = subprocess.run(
        [program, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    if probe.returncode != 0:
        raise ConfigError(
            f"COMMAND: {program} has no torch and tpwrap; this tpwrap belongs to {executable}: "
            "activate its environment, or write that path instead of python"
        )


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Python's own options, as letters without the dash, and what follows them: script, -m or -c first."""
    options: list[str] = []
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-", "-m", "-c"):
        option = arguments.pop(0)
        letters = option.removeprefix("-")
        if letters in ("W", "X", "-check-hash-based-pycs") and arguments:
            letters += arguments.pop(0)
        options.append(letters)
    return options, arguments

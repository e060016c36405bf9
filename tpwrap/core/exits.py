"""How a process has ended, in words: the same ones everywhere."""

from __future__ import annotations

import signal


def describe(returncode: int) -> str:
    """'exited with code 3' or 'was killed by SIGSEGV'. returncode: as in subprocess, negative for a signal."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"  # of the real-time ones only two have a name

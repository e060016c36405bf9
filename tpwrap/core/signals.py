"""The signals by which a job is told to end. Slurm sends them to every process of a step at once."""

from __future__ import annotations

import signal

EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGUSR1": 138, "SIGUSR2": 140, "SIGTERM": 143}
"""name -> exit code of a job that ended by it"""
ALL = tuple(signal.Signals[name] for name in EXIT_CODES)

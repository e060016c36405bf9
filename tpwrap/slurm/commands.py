"""Slurm's own commands, as far as a job's owner may use them. Each may block for seconds while slurmctld is away:
not for the training's path."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

_PATIENCE = 20.0


class SlurmError(Exception):
    """A command failed; the text is what it said, in one line."""


def run(argv: Sequence[str], patience: float = _PATIENCE) -> str:
    """Standard output of `argv`. SlurmError if it fails or takes longer than `patience` seconds."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=_environment(),
        )
    except OSError as e:
        raise SlurmError(f"{argv[0]}: {e.strerror}") from None
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise SlurmError(f"{argv[0]} gave no answer within {patience:g} s") from None
    if process.returncode != 0:
        said = " ".join((err or out).split())
        raise SlurmError(said or f"{argv[0]} ended with code {process.returncode}")
    return out


def _environment() -> dict[str, str]:
    """Without the defaults that a step's environment holds for commands, and without a format of the user's."""
    hidden = ("SQUEUE_", "SCONTROL_", "SINFO_")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)} | {"LC_ALL": "C"}


def config() -> dict[str, str]:
    """slurm.conf as slurmctld has it: `scontrol show config`."""
    pairs = (line.partition("=") for line in run(["scontrol", "show", "config"]).splitlines())
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def comment(job: str) -> str:
    """The comment of a job; "" if there is none."""
    text = run(["squeue", "--noheader", "--jobs", job, "--format", "%k"]).strip()
    return "" if text == "(null)" else text


def set_comment(job: str, text: str) -> None:
    run(["scontrol", "update", f"jobid={job}", f"comment={text}"])


def cancel(job: str) -> None:
    run(["scancel", job])


def requeue(job: str) -> None:
    run(["scontrol", "requeue", job])


def state(job: str) -> tuple[bool, bool]:
    """(Whether the job still runs, whether it may be started again: sbatch's default on most sites.)"""
    text = f" {run(['scontrol', '--oneliner', 'show', 'job', job])} "
    return " JobState=RUNNING " in text, " Requeue=1 " in text

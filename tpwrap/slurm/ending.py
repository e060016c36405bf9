"""How a job whose batch script is gone must be ended: nobody else does, and it would hold its nodes until its limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from tpwrap.core import endings
from tpwrap.slurm import commands, probe
from tpwrap.slurm.commands import SlurmError

Action: TypeAlias = Literal["nothing", "cancel", "requeue"]
WORTH_ANOTHER_START = (endings.INTERNAL, endings.OUT_OF_SPARES, endings.COORDINATOR_LOST)
"""exit codes of tpwrap's own: it could not go on, and neither the script nor a person is the reason"""
_FIRST_RETRY, _LONGEST_RETRY = 2.0, 60.0
_STAGGER = 0.05


def decide(exit_code: int, running: bool, may_requeue: bool, batch_host_answers: bool) -> tuple[Action, str]:
    """What to do about a job that has ended with `exit_code`, and why."""
    if not running:
        return "nothing", "Slurm has ended the job already"
    if batch_host_answers:
        return "nothing", "the host of the batch script answers: the script ends the job"
    if exit_code == 0:
        return "cancel", "training has finished, but the batch script was lost with its node, so nothing ends the job"
    if exit_code not in WORTH_ANOTHER_START:
        return "cancel", f"training has ended with code {exit_code}, and the batch script was lost with its node"
    if may_requeue:
        return "requeue", "the batch script was lost with its node; the job starts again from its last checkpoint"
    return "cancel", "the batch script was lost with its node, and the job was submitted with --no-requeue"


def end(job: str, exit_code: int, batch_host: str, node: int, say: Callable[[str], None]) -> None:
    """End the job if nobody else does. Returns when that is done; tries for as long as slurmctld is away.

    node: number of this node; those that do the same at the same time do it one after the other.
    """
    time.sleep(min(5.0, _STAGGER * node))
    pause = _FIRST_RETRY
    while True:
        try:
            running, may_requeue = commands.state(job)
            # Only now: a node that was cut off for a while finds slurmctld and the batch host again together.
            action, reason = decide(exit_code, running, may_requeue, probe.answers(batch_host))
            if action == "cancel":
                commands.cancel(job)
            elif action == "requeue":
                commands.requeue(job)
        except SlurmError as e:
            say(f"job {job} has lost its batch script and must be ended: {e}; next attempt in {pause:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_RETRY)
            continue
        if action != "nothing":
            say(f"job {job} is {'cancelled' if action == 'cancel' else 'requeued'}: {reason}")
        return

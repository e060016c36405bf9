"""How a job whose batch script is gone must be ended: nobody else does, and it would hold its nodes until its limit."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tpwrap.slurm import commands

Action: TypeAlias = Literal["cancel", "requeue"]


def decide(finished: bool, may_requeue: bool) -> tuple[Action, str]:
    """What to do about a job without a batch script, and why."""
    if finished:
        return "cancel", "training has finished, but the batch script was lost with its node, so nothing ends the job"
    if may_requeue:
        return "requeue", "the batch script was lost with its node; the job starts again from its last checkpoint"
    return "cancel", "the batch script was lost with its node, and the job was submitted with --no-requeue"


def end(job_id: int, finished: bool) -> str:
    """End the job; returns what was done and why. SlurmError if Slurm does not do it."""
    action, reason = decide(finished, finished or commands.may_requeue(job_id))
    if action == "cancel":
        commands.cancel(job_id)
    else:
        commands.requeue(job_id)
    return f"job {job_id} is {'cancelled' if action == 'cancel' else 'requeued'}: {reason}"

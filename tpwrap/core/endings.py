"""How jobs end when they cannot go on: (exit code, reason, traceback)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tpwrap.control.messages import Failed
from tpwrap.core.lint import Finding, one_line
from tpwrap.core.placement import Unplaceable
from tpwrap.core.shards import named
from tpwrap.core.state import State

Ending: TypeAlias = tuple[int, str, str]

USAGE = 2
INTERNAL = 70
OUT_OF_SPARES = 75
COORDINATOR_LOST = 76

OVER_BUDGET = "the collectives of one step need more memory for replay than allowed; raise TORCHPASS_REPLAY_BUDGET_MB"


def everyone_raised(state: State, now: float) -> Ending | None:
    """All ranks failed by exception at nearly the same time: the script is at fault, not a slot."""
    views = list(state.ranks.values())
    first: Failed | None = None
    first_at = now
    for view in views:
        if view.failed is None:
            return None
        recent = now - view.failed_at <= state.times.comm_error_grace
        if view.live and not recent:
            return None
        if first is None or view.failed_at < first_at:
            first, first_at = view.failed, view.failed_at
    assert first is not None
    what = "every rank failed" if len(views) > 1 else "the only rank failed"
    return by_script(first, f"{what}: {first.error}")


def by_script(failed: Failed, reason: str) -> Ending:
    code = failed.exit_code if failed.exit_code > 0 else 1
    return code, reason, failed.traceback


def nobody_left(state: State) -> Ending | None:
    """No survivor. None while nobody had anything to lose: then all start from the top of the script."""
    losses = [view.loss for view in state.ranks.values() if view.loss is not None]
    if losses and len(losses) == len(state.ranks) and all(loss.exited_with_0 for loss in losses):
        return 0, "every rank ended with exit code 0 (without returning from its script)", ""
    if not state.any_set_up:
        return None
    raised = sorted(
        (view.failed_at, view.rank, view.failed) for view in state.ranks.values() if view.failed is not None
    )
    if raised:
        _, rank, failed = raised[0]
        return by_script(failed, f"rank {rank} failed and no rank is left to heal it from: {failed.error}")
    causes = "; ".join(f"rank {view.rank}: {view.loss.cause}" for view in state.ranks.values() if view.loss)
    return (
        OUT_OF_SPARES,
        f"every rank was lost at once, so no copy of the model is left ({causes}). "
        "Start the job again from its last checkpoint",
        "",
    )


def shard_lost(ranks: Sequence[int], step: int) -> Ending:
    """ranks: all that held one shard. step: where the others are."""
    when = f"after update {step}" if step > 0 else "at the start of the training"
    whose = "this shard" if len(ranks) == 1 else "their shard"
    return (
        OUT_OF_SPARES,
        f"{named(ranks)} {'was' if len(ranks) == 1 else 'were'} lost {when}, and no other rank holds {whose} of the "
        "model, so no copy of it is left. Start the job again: it must resume from its last checkpoint. More replicas "
        "of each shard, on different nodes, would have kept it going",
        "",
    )


def states_differ(what: str, agreed: int) -> Ending:
    """agreed: the newest step at which replicas were found to be equal; -1: none was."""
    known = f". They were equal after update {agreed}" if agreed >= 0 else ""
    until = f"of update {agreed} or before" if agreed >= 0 else "before that"
    return (
        INTERNAL,
        f"{what}{known}. Either a device or its memory has computed wrongly, or the script lets replicas drift apart. "
        f"Start the job again from a checkpoint {until}",
        "",
    )


def set_up_differs(ranks: Sequence[int]) -> Ending:
    """Newcomers of ranks that died before they had told which shard they hold: they were not served by guess."""
    whose = "its new worker's set-up" if len(ranks) == 1 else "the set-ups of their new workers"
    return unprotected(
        ranks,
        f"lost with the news of what it held, and {whose} came out differently from the other ranks'. "
        "No update has been applied: start the job again",
    )


def over_budget(ranks: Sequence[int]) -> Ending:
    """Survivors that can neither replay nor redo their step."""
    return unprotected(ranks, OVER_BUDGET)


def unprotected(ranks: Sequence[int], reason: str) -> Ending:
    return INTERNAL, f"{named(ranks)} cannot be protected any further: {reason}", ""


def no_place(state: State, choice: Unplaceable) -> Ending:
    """A lost rank has no slot: out of spares, or the script fails wherever it runs."""
    view = state.ranks[choice.rank]
    if choice.repeated and view.failed is not None:
        return by_script(view.failed, f"{choice.reason}; giving up: the script is at fault")
    if state.broken and not state.workers and not state.gone:
        last = list(state.broken.values())[-1]
        code = last.returncode if last.returncode > 0 else 1
        return code, f"the command never becomes a worker, in no slot: {last.how}", ""
    return OUT_OF_SPARES, choice.reason, ""


def without_store(state: State, cause: str) -> Ending:
    reason = (
        f"{cause}. This cannot be healed, because the rendezvous store has ended. "
        "Start the job again from its last checkpoint"
    )
    failed = next((view.failed for view in state.ranks.values() if view.failed is not None), None)
    return (INTERNAL, reason, "") if failed is None else by_script(failed, reason)


def not_healed(state: State, why: str) -> Ending:
    """A failure in a job that goes on without healing."""
    failed = next((view.failed for view in state.ranks.values() if view.failed is not None), None)
    causes = "; ".join(f"rank {view.rank}: {view.loss.cause}" for view in state.ranks.values() if view.loss)
    reason = (
        f"{causes or 'a collective failed'}. This cannot be healed: {why}. "
        "Start the job again from its last checkpoint"
    )
    return (INTERNAL, reason, "") if failed is None else by_script(failed, reason)


def left_behind(finished: Sequence[int], waiting: Sequence[int], where: str) -> Ending:
    """Ranks wait in a collective that others, whose scripts are over, never take part in."""
    return (
        1,
        f"{named(finished)} {'has' if len(finished) == 1 else 'have'} finished the script, but "
        f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {where}, in which "
        f"{'it' if len(finished) == 1 else 'they'} never took part. The script is at fault: every rank must take part "
        "in every collective. Give all ranks the same number of steps (DistributedSampler, drop_last=True), and let "
        "none return or exit early",
        "",
    )


def not_protected(rank: int, findings: Sequence[Finding]) -> Ending:
    """With --strict: what is not protected, and what to do about it."""
    first, *others = [one_line(finding) for finding in findings]
    more = f" (and {len(others)} more)" if others else ""
    return USAGE, f"--strict: rank {rank}: {first}{more}. Without --strict the job runs nevertheless", ""


def sidecar_lost(rank: int, keepers: Sequence[int]) -> Ending:
    where = ", ".join(map(str, keepers)) or "none"
    return (
        OUT_OF_SPARES,
        f"rank {rank} cannot be restored: the nodes that kept its random state and data position are lost, "
        f"too ({where}). Start the job again from its last checkpoint, with more spares to keep more copies",
        "",
    )

"""Nothing moves: who waits for whom, and is that the end of the job or news for a person?

When no rank has moved for a while, every rank is asked where it is (`Look`), again and again. Two things can follow.

* The end, where a rank has finished its script and another one waits in a collective that the finished one has not
  taken part in: it never will. Collectives are compared by their numbers, so a rank that still computes, or a network
  that is slow, is never mistaken for that.
* A notice, otherwise. It never ends the job: an evaluation on one rank, a checkpoint or a compilation look the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tpwrap.control.messages import Look, Waiting, Whereabouts
from tpwrap.core import endings, events
from tpwrap.core.state import Draft, State

_STEPS = 3
"""a notice comes after so many of the longest steps seen"""
_GROWTH = 3
"""the next one after so many times as long"""
_LONGEST_PERIOD = 6
"""of questions, in units of failure_timeout: a step that took an hour once must not hide what follows for so long"""
_MOST_NAMED = 8


def stepped(d: Draft) -> None:
    """A rank has made a step."""
    gap, longest = d.now - _still_since(d.state), d.state.standstill.longest
    d.set(standstill=replace(d.state.standstill, longest=max(gap, longest or 0.0)))
    moved(d)


def moved(d: Draft) -> None:
    """A rank has come further, or all time before now shall not count."""
    d.set(standstill=replace(d.state.standstill, moved=d.now, notices=0, collecting=False, before={}))


def look(d: Draft) -> None:
    """Every tick while training runs: ask, and judge what was answered."""
    still, period = d.state.standstill, _period(d.state)
    if still.generation != d.state.generation:
        still = replace(still, generation=d.state.generation, collecting=False, before={})
        d.set(standstill=still)
    waited = d.now - max(still.asked, _still_since(d.state))
    if still.collecting and waited >= period:
        _judge(d)
    elif not still.collecting and waited >= period:
        d.set(standstill=replace(still, asked=d.now, collecting=True, answers={}))
        for rank in d.state.ranks:
            d.send_rank(rank, Look())


def answered(d: Draft, rank: int, answer: Whereabouts) -> None:
    still = d.state.standstill
    if not still.collecting or still.generation != d.state.generation:
        return
    still = replace(still, answers={**still.answers, rank: answer})
    d.set(standstill=still)
    if len(still.answers) == len(d.state.ranks):
        _judge(d)


def _still_since(state: State) -> float:
    return max(state.standstill.moved, state.since)


def _judge(d: Draft) -> None:
    still = d.state.standstill
    finished = [rank for rank, view in d.state.ranks.items() if view.finished]
    left = left_behind(finished, still.answers, d.state.times.failure_timeout)
    if left is not None:
        d.end(*endings.left_behind(left.finished, left.waiting, _where(left.wait, left.line)))
        return
    d.set(standstill=replace(still, collecting=False, before=still.answers))
    if not still.before:
        return
    if any(_came_further(still.before.get(rank), answer) for rank, answer in still.answers.items()):
        moved(d)
        d.set(standstill=replace(d.state.standstill, before=still.answers))
        return
    idle = d.now - _still_since(d.state)
    waits = any(answer.waits for answer in still.answers.values())
    if idle >= _limit(d.state) * _GROWTH**still.notices and (waits or d.state.any_set_up):
        d.set(standstill=replace(d.state.standstill, notices=still.notices + 1))
        who = tell(d.state.ranks, finished, still.answers)
        d.emit(events.Notice("warning", f"no progress for {idle:.0f} s: {who}"))


def _period(state: State) -> float:
    """Between two questions. Where steps are long, nobody is asked in the middle of an ordinary one."""
    unit = state.times.failure_timeout
    return max(unit / 2, min(state.standstill.longest or 0.0, _LONGEST_PERIOD * unit))


def _limit(state: State) -> float:
    """Before the first step is through nobody knows how long one takes: compilation, warm-up of a device."""
    longest = state.standstill.longest
    return state.times.restore if longest is None else max(state.times.failure_timeout, _STEPS * longest)


def _came_further(before: Whereabouts | None, now: Whereabouts) -> bool:
    return before is not None and (before.step, before.joined) != (now.step, now.joined)


# --- pure: what the answers mean -------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftBehind:
    """Ranks that have finished, and ranks that wait for them for ever; one such wait and its line in the script."""

    finished: list[int]
    waiting: list[int]
    wait: Waiting
    line: str


def left_behind(finished: Iterable[int], answers: Mapping[int, Whereabouts], patience: float) -> LeftBehind | None:
    """Who has waited for longer than `patience` for what a finished rank will never do?"""
    gone = [rank for rank in finished if rank in answers]
    found = [
        (rank, other, wait)
        for other, answer in answers.items()
        if other not in gone
        for wait in answer.waits
        for rank in gone
        if wait.seconds >= patience and _never_joins(answers[rank], wait)
    ]
    if not found:
        return None
    _, first, wait = min(found, key=lambda one: (one[2].step, one[2].number, one[1]))
    return LeftBehind(
        sorted({rank for rank, _, _ in found}), sorted({other for _, other, _ in found}), wait, answers[first].line
    )


def _never_joins(finished: Whereabouts, wait: Waiting) -> bool:
    joined = finished.joined.get(wait.group)
    if joined is None:
        return wait.everyone  # a group of all ranks that it has not even made
    return wait.number >= 0 and (wait.step, wait.number) >= joined


def tell(ranks: Iterable[int], finished: Iterable[int], answers: Mapping[int, Whereabouts]) -> str:
    """'ranks 0, 2 wait in barrier at step 7 (collective 0 of group 1, train.py:42); rank 1 is at train.py:50 and waits
    in no collective'."""
    over = set(finished)
    same: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(ranks):
        same.setdefault(_state_of(rank in over, answers.get(rank)), []).append(rank)
    return "; ".join(
        f"{name_ranks(who)} {one if len(who) == 1 else many}" for (one, many), who in sorted(same.items(), key=_first)
    )


def _first(item: tuple[tuple[str, str], list[int]]) -> int:
    return item[1][0]


def _state_of(finished: bool, answer: Whereabouts | None) -> tuple[str, str]:
    """As a predicate for one rank, and for several."""
    if finished:
        return "has finished its script", "have finished their scripts"
    if answer is None:
        return "does not answer", "do not answer"
    if answer.waits:
        oldest = max(answer.waits, key=lambda wait: wait.seconds)
        where = _where(oldest, answer.line)
        return f"waits in {where}", f"wait in {where}"
    line = f"at {answer.line}" if answer.line else "elsewhere"
    return f"is {line} and waits in no collective", f"are {line} and wait in no collective"


def _where(wait: Waiting, line: str) -> str:
    step = f"at step {wait.step}" if wait.step >= 0 else "during set-up"
    group = "group " + wait.group.partition("#")[0]
    which = f"collective {wait.number} of {group}" if wait.number >= 0 else group
    return f"{wait.operation} {step} ({which}{', ' if line else ''}{line})"


def name_ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} others" if len(ranks) > _MOST_NAMED else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + named + more

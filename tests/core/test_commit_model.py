"""The commit rule in a model of training, explored exhaustively: every order of updates, votes and failures.

Ranks, their updates and what they have been told are all there is here: no nodes, no workers, no messages but those
that decide where a rank stands (`test_model.py` has these). So every state can be visited, with up to three failures at
any moment. What is decided, is decided by the functions of `tpwrap.core`; the model is the workers' side, and the
oracle:

* nobody applies an update without having finished all operations of its step, in which every rank takes part;
* nobody goes back: a plan never enters before a rank's update that is, or will be, applied, nor before the last plan;
* a newcomer enters at a step that a live replica of its shard holds, or is about to hold;
* all ranks end with the same number of updates, or the job ends with a verdict that is true;
* nothing ever waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

from tpwrap.control.messages import Ready, Released
from tpwrap.core import commit, shards

RUN, DONE, VOTED = range(3)
"""Of a rank in a step: it runs; all operations have finished; it has passed the vote, or was told to roll forward."""


class Rank(NamedTuple):
    """at: R: runs in this generation. L: ran in it, and has let go. D: ran in it, and has died. H: held since an older
    generation, its communicators of this one stand. N: a newcomer. E: a newcomer that has copied its state."""

    at: str
    step: int = 0
    phase: int = RUN
    asked: bool = False
    """the coordinator has its `FirstUpdate`"""
    rule: bool = False
    """it knows the rule"""
    told: bool = False
    """it has the plan of this generation"""


class State(NamedTuple):
    """stage: train (who is held may go on) | release | restore."""

    ranks: tuple[Rank, ...]
    failures: int
    stage: str = "train"
    votes: bool | None = None
    floor: int = -1
    """step of the last plan"""
    way: str = ""
    plans: int = 0


class Broken(AssertionError):
    """What must never be."""


@dataclass(frozen=True)
class Rules:
    """The functions under test."""

    choose: Callable[..., commit.Entry] = commit.choose
    rule: Callable[..., shards.Rule] = shards.rule
    replicas: Callable[..., list[int]] = shards.replicas
    extinct: Callable[..., list[int]] = shards.extinct
    verify: Callable[..., commit.Verdict] = commit.verify


@dataclass(frozen=True)
class Model:
    """shards: of each rank, in the order of their names. steps: until the end. cut: ranks that do not keep the inputs
    of their collectives. redo: ranks that can run a step once more."""

    shards: str
    steps: int
    failures: int
    cut: Collection[int] = ()
    redo: Collection[int] = ()
    rules: Rules = Rules()

    def explore(self) -> tuple[int, set[str]]:
        """Visit every state; how many there are, and how jobs end. Raises Broken."""
        names = dict(enumerate(self.shards))
        start = self.alike(State((Rank("R"),) * len(names), self.failures))
        seen, ends, level = {start}, set[str](), [start]
        while level:
            following: list[State] = []
            for state in level:
                found = list(self.after(state))
                if not found:
                    ends.add(self.end(state))
                for one in found:
                    if isinstance(one, str):
                        ends.add(one)
                        continue
                    check(_progress(one) > _progress(state), "no progress, so it might go on for ever", state, one)
                    one = self.alike(one)
                    if one not in seen:
                        seen.add(one)
                        following.append(one)
            level = following
        return len(seen), ends

    def alike(self, state: State) -> State:
        """One for all states that differ by the names of the ranks of a shard only."""
        if self.cut or len(set(self.redo)) not in (0, len(self.shards)):
            return state
        groups: dict[str, list[Rank]] = {}
        for name, rank in zip(self.shards, state.ranks, strict=True):
            groups.setdefault(name, []).append(rank)
        ordered = [sorted(ranks) for ranks in groups.values()]
        if len({len(ranks) for ranks in ordered}) == 1:
            ordered.sort()
        return state._replace(ranks=tuple(rank for ranks in ordered for rank in ranks))

    # --- what can happen ---------------------------------------------------------------------------

    def after(self, state: State) -> Iterator[State | str]:
        """All states that may follow, or the verdict with which the job ends."""
        for r, rank in enumerate(state.ranks):
            for changed in self.moves(state, r, rank):
                yield _with(state, r, changed)
            if state.votes is None and rank.at in "RLH" and self.waits_for_rule(rank) and not rank.asked:
                yield self.ask(_with(state, r, rank._replace(asked=True)))
            if state.failures and rank.at != "D":
                yield _fail(state, r)
        if state.stage == "release" and not any(rank.at == "R" for rank in state.ranks):
            yield self.decide(state)
        if state.stage == "restore" and all(self.in_place(state, rank) for rank in state.ranks):
            yield self.go_on(state)

    def moves(self, state: State, r: int, rank: Rank) -> Iterator[Rank]:
        """What rank `r` may do next."""
        if state.votes is not None and not rank.rule and rank.at in "RLH":
            yield rank._replace(rule=True)
        if rank.at == "R":
            yield from self.trains(state, rank)
            if state.stage == "release":
                yield rank._replace(at="L")
        elif state.stage == "train" and rank.at == "H":
            yield rank._replace(at="R", told=False)
        elif state.stage == "restore" and rank.at == "H":
            if not rank.told:
                yield self.obeys(state, rank)
            elif rank.step < state.floor:
                yield self.updates(state, rank)
        elif state.stage == "restore" and rank.at == "N":
            ready = [other for other in self.replicas_of(state, r) if other.at == "H" and other.step == state.floor]
            if ready or state.floor == 0:
                yield rank._replace(at="E")

    def trains(self, state: State, rank: Rank) -> Iterator[Rank]:
        if rank.step == self.steps:
            return
        in_step = [o for o in state.ranks if o.at in "RLD"]
        if len(in_step) < len(state.ranks):
            in_step = []
        if rank.phase == RUN:
            if in_step and all(other.step >= rank.step for other in in_step):
                yield rank._replace(phase=DONE)
        elif not rank.rule:
            return
        elif rank.phase == VOTED or not state.votes:
            yield self.updates(state, rank)
        elif in_step and all((o.step, o.phase, o.rule) >= (rank.step, DONE, True) for o in in_step):
            yield rank._replace(phase=VOTED)

    def waits_for_rule(self, rank: Rank) -> bool:
        return rank.step == 0 and rank.phase == DONE

    def updates(self, state: State, rank: Rank) -> Rank:
        check(rank.phase >= DONE, "an update without valid gradients of all ranks", state, rank)
        return rank._replace(step=rank.step + 1, phase=RUN)

    def ask(self, state: State) -> State:
        """The coordinator has got another `FirstUpdate`."""
        if not all(rank.asked for rank in state.ranks):
            return state
        return state._replace(votes=self.rules.rule(dict(enumerate(self.shards)), self.redo).votes)

    # --- a recovery ----------------------------------------------------------------------------------

    def decide(self, state: State) -> State | str:
        names: shards.Shards = dict(enumerate(self.shards))
        released = {
            r: Released(1, rank.step, 0.0, rank.phase == VOTED, self.replay_from(r, rank))
            for r, rank in enumerate(state.ranks)
            if rank.at in "LH"
        }
        if not released:
            return "nobody is left"
        entry = self.rules.choose(released, bool(state.votes), state.floor, self.redo)
        lost = self.rules.extinct(names, released)
        if lost:
            check(not any(r in released for r in lost), "a shard was said to be lost", state, lost)
            return "a shard is lost"
        if entry.way is None:
            check(any(one.replay_from > entry.step for one in released.values()), "replay would do", state, entry)
            check(any(r not in self.redo for r in released), "redo would do", state, entry)
            return "cannot cross"
        check(entry.step >= state.floor, "the plan goes back", state, entry)
        for r, report in released.items():
            self.check_crossing(state, entry, report, r)
        for r, rank in enumerate(state.ranks):
            if rank.at in "DN":
                self.check_sources(state, entry, r, self.rules.replicas(r, names, entry.holders), released)
        return state._replace(
            ranks=tuple(
                rank._replace(at="H", told=False) if r in released else Rank("N", asked=rank.asked)
                for r, rank in enumerate(state.ranks)
            ),
            stage="restore",
            floor=entry.step,
            way=entry.way,
            plans=state.plans + 1,
        )

    def replay_from(self, r: int, rank: Rank) -> int:
        return rank.step + 1 if r in self.cut and rank.step < self.steps else -1

    def check_crossing(self, state: State, entry: commit.Entry, report: Released, r: int) -> None:
        ahead = report.step + report.voted - entry.step
        if state.votes:
            check(ahead <= 0, "an update would have to be undone", state, entry)
        else:
            check(0 <= ahead <= 1, "it can serve one step back and no more", state, entry)
        if entry.way == "replay":
            check(report.replay_from <= entry.step, "the log does not reach back", state, entry)
        else:
            check(r in self.redo and ahead <= 0, "it cannot run that step once more", state, entry)

    def check_sources(
        self, state: State, entry: commit.Entry, r: int, sources: list[int], released: dict[int, Released]
    ) -> None:
        check(bool(sources) or entry.step == 0, "a newcomer without anybody to copy from", state, entry)
        for source in sources:
            check(self.shards[source] == self.shards[r], "a source of another shard", state, entry)
            check(source in released, "a source that is not live", state, entry)
            at = released[source].step
            check(at == entry.step or (bool(state.votes) and at < entry.step), "a source at another step", state, entry)

    def obeys(self, state: State, rank: Rank) -> Rank:
        """A survivor gets the plan."""
        phase = rank.phase
        if rank.step < state.floor:
            check(phase >= DONE, "told to apply an update without valid gradients of all ranks", state, rank)
            phase = VOTED
        elif state.way == "redo":
            phase = RUN
        return rank._replace(told=True, phase=phase, rule=rank.rule or state.votes is not None)

    def replicas_of(self, state: State, r: int) -> list[Rank]:
        return [rank for other, rank in enumerate(state.ranks) if self.shards[other] == self.shards[r]]

    def in_place(self, state: State, rank: Rank) -> bool:
        return rank.at == "E" or (rank.at == "H" and rank.told and rank.step >= state.floor)

    def go_on(self, state: State) -> State:
        """Everybody is ready."""
        ready = {}
        for r, rank in enumerate(state.ranks):
            step = state.floor if rank.at == "E" else rank.step
            ready[r] = Ready(1, step, f"{self.shards[r]}{step}", "", {})
        verdict = self.rules.verify(ready, dict(enumerate(self.shards)), state.floor if state.votes else None)
        check(verdict.agree, verdict.reason, state, None)
        entered = Rank("H", state.floor, asked=True, rule=state.votes is not None, told=True)
        ranks = tuple(
            entered._replace(asked=rank.asked) if rank.at == "E" else rank._replace(told=True) for rank in state.ranks
        )
        return state._replace(ranks=ranks, stage="train", way="")

    def end(self, state: State) -> str:
        """Nothing can happen any more: that must be the end of the training."""
        done = all(rank.at == "R" and rank.step == self.steps for rank in state.ranks)
        check(done and state.stage == "train", "it waits for ever", state, None)
        return "finished"


def _with(state: State, r: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:r], rank, *state.ranks[r + 1 :]))


def _fail(state: State, r: int) -> State:
    """Rank `r` dies. What it has sent arrives; whoever was held goes on being held, and whoever entered starts over."""
    dead = state.ranks[r]
    ranks = [rank._replace(at="N") if rank.at == "E" else rank._replace(told=False) for rank in state.ranks]
    ranks[r] = dead._replace(at="D", told=False) if dead.at in "RL" else Rank("N", asked=dead.asked)
    return state._replace(ranks=tuple(ranks), failures=state.failures - 1, stage="release", way="")


_STATUS = {at: n for n, at in enumerate("NEHRLD")}


def _progress(state: State) -> tuple[int, ...]:
    """Grows with everything that happens."""
    ranks = state.ranks
    return (
        -state.failures,
        state.plans,
        state.stage == "train",
        sum(rank.told for rank in ranks) if state.stage == "restore" else 0,
        sum(3 * rank.step + rank.phase for rank in ranks),
        sum(_STATUS[rank.at] for rank in ranks),
        sum(rank.asked + rank.rule for rank in ranks),
    )


def check(holds: bool, what: str, state: State, detail: object) -> None:
    if not holds:
        raise Broken(f"{what}: {detail}\n{state}")


# --- the rule holds ------------------------------------------------------------------------------------

HELD = {
    "two shards": (Model("aabb", 2, 3), {"finished", "a shard is lost"}),
    "two shards, more steps": (Model("aabb", 3, 2), {"finished", "a shard is lost"}),
    "shards without replicas": (Model("aab", 2, 3), {"finished", "a shard is lost", "nobody is left"}),
    "one shard, no votes": (Model("aaaa", 3, 3), {"finished"}),
    "steps that can be redone": (Model("aaa", 3, 3, redo=range(3)), {"finished", "nobody is left"}),
    "redone because one keeps nothing": (Model("aaa", 2, 3, cut=[1], redo=range(3)), {"finished", "nobody is left"}),
    "redone in shards": (Model("aabb", 2, 2, cut=[0, 1, 2, 3], redo=range(4)), {"finished", "a shard is lost"}),
    "redo and one that cannot": (
        Model("aab", 2, 2, cut=[0], redo=[0, 1]),
        {"finished", "a shard is lost", "cannot cross"},
    ),
    "neither": (Model("aaa", 2, 2, cut=[0]), {"finished", "cannot cross"}),
}


@pytest.mark.parametrize("case", HELD)
def test_every_order_of_updates_votes_and_failures(case: str) -> None:
    model, ends = HELD[case]
    count, found = model.explore()
    assert found == ends
    assert count > 1000


# --- and breaking it shows -----------------------------------------------------------------------------


def _least_advanced(released: dict[int, Released], votes: bool, floor: int, redo: Collection[int]) -> commit.Entry:
    return commit.choose(released, False, floor, redo)


def _most_advanced(released: dict[int, Released], votes: bool, floor: int, redo: Collection[int]) -> commit.Entry:
    return commit.choose(released, True, floor, redo)


def _forgetful(released: dict[int, Released], votes: bool, floor: int, redo: Collection[int]) -> commit.Entry:
    return commit.choose(released, votes, -1, redo)


def _deaf(released: dict[int, Released], votes: bool, floor: int, redo: Collection[int]) -> commit.Entry:
    """Asks only for updates that are applied."""
    plain = {r: Released(1, one.step, 0.0, False, one.replay_from) for r, one in released.items()}
    return commit.choose(plain, votes, floor, redo)


def _always(way: Any) -> Callable[..., commit.Entry]:
    return lambda *args: replace(commit.choose(*args), way=way)


def _no_votes(names: shards.Shards, redo: Collection[int]) -> shards.Rule:
    return replace(shards.rule(names, redo), votes=False)


def _anybody(rank: int, names: shards.Shards, among: Collection[int]) -> list[int]:
    return sorted(among)


def _of_all(names: shards.Shards, live: Collection[int]) -> list[int]:
    """Looks whether anybody is left, whatever he holds."""
    return shards.extinct(dict.fromkeys(names, ""), live)


SHARDS = HELD["two shards"][0]
REDONE = HELD["redone because one keeps nothing"][0]
BROKEN = {
    "the least advanced decides though all vote": (SHARDS, {"choose": _least_advanced}, "undone|internal|went back"),
    "the most advanced decides though nobody votes": (
        HELD["one shard, no votes"][0],
        {"choose": _most_advanced},
        "without valid gradients|serve one step back",
    ),
    "a vote that has passed is not asked for": (SHARDS, {"choose": _deaf}, "undone"),
    "the last plan is forgotten": (SHARDS, {"choose": _forgetful}, "the plan goes back"),
    "shards without votes": (SHARDS, {"rule": _no_votes}, "nobody to copy from|without anybody"),
    "redo without votes": (REDONE, {"rule": _no_votes}, "cannot run that step once more"),
    "sources from any shard": (SHARDS, {"replicas": _anybody}, "a source of another shard"),
    "a lost shard is not noticed": (SHARDS, {"extinct": _of_all}, "without anybody to copy from"),
    "replay without the log": (REDONE, {"choose": _always("replay")}, "the log does not reach back"),
    "redo by one that cannot": (HELD["neither"][0], {"choose": _always("redo")}, "cannot run that step once more"),
    "giving up where redo would do": (REDONE, {"choose": _always(None)}, "would do"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_rule_is_caught(how: str) -> None:
    model, mutant, what = BROKEN[how]
    with pytest.raises((Broken, commit.Impossible), match=what):
        replace(model, rules=Rules(**mutant)).explore()

"""Membership in a small world: every order of events that can be afforded, with faults anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from small_world import Choice, World

from tpwrap.core.job import Job
from tpwrap.core.state import Stage

FAULTS = ("kill", "node", "raise", "stop", "comm", "silence", "exit0")
TARGET = 3


def possible(world: World, kinds: tuple[str, ...]) -> list[Choice]:
    found: list[Choice] = []
    for kind in kinds:
        if kind in ("node", "silence"):
            found += [(kind, n, "") for n, node in world.nodes.items() if node.alive and not node.silent]
        else:
            found += [
                (kind, w.node, w.id)
                for w in world.workers.values()
                if w.alive and not w.stopped and (w.rank is not None or kind == "kill")
            ]
    return found


class Order:
    """A random order in which some links and workers are far slower than others, for a while."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.left = 0
        self.weights: dict[tuple[str, int], float] = {}

    def next(self, choices: list[Choice]) -> Choice:
        if self.choose.random() < 0.02:
            return ("tick", 0, "")
        if self.left == 0:
            self.left = self.choose.randint(5, 60)
            self.weights.clear()
        self.left -= 1
        weights = [
            self.weights.setdefault((what, node), self.choose.choice((1.0, 1.0, 0.3, 0.003)))
            for what, node, _ in choices
        ]
        return self.choose.choices(choices, weights)[0]


def finish(world: World) -> None:
    """Run to the end of the job, which must come."""
    for _ in range(3000):
        if world.end is not None:
            return
        choices = world.choices()
        if choices:
            world.step(choices[0])
        else:
            world.pass_time()
    raise AssertionError("the job never ends:\n" + world.story())


def told(world: World, faults: list[Choice]) -> str:
    return f"{world.end}\n{faults}\n{world.story()}"


def judge(world: World, faults: list[Choice]) -> None:
    assert world.end is not None
    code, reason = world.end.exit_code, world.end.reason
    assert "internal" not in reason, told(world, faults)
    if code == 0 and "exit code 0" not in reason:
        ranks = world.state.ranks.values()
        assert all(rank.finished and rank.step == TARGET for rank in ranks), told(world, faults)
    if len(faults) <= world.job.sidecar_copies:
        assert not world.sidecar_missing, told(world, faults)
    kinds = [kind for kind, _, _ in faults]
    if not {"stop", "silence"}.intersection(kinds):
        assert world.now <= 4 * kinds.count("comm"), "waited for a deadline:\n" + told(world, faults)
    if "to an update, so nobody knows" in reason or "too late for a vote" in reason:
        assert world.stop_seen_after > world.state.times.first_update, told(world, faults)
        assert "stop" in [kind for kind, _, _ in faults], told(world, faults)
        return
    if "came out differently" in reason:
        assert min(map(world.shards.count, world.shards)) == 1, told(world, faults)
        return
    if "cannot be protected" in reason:
        assert world.cut, told(world, faults)
        return
    replicas = min(map(world.shards.count, world.shards))
    if len(faults) <= world.job.spares and replicas > len(faults):
        assert code == 0, told(world, faults)


def story(seed: int, job: Job, **of_world: Any) -> None:
    choose = random.Random(seed)
    order = Order(choose)
    world = World(job, TARGET, **of_world)
    world.stop_seen_after = choose.choice((10.0, 300.0))
    faults: list[Choice] = []
    wanted = choose.choice((1, 2, 3, 3))
    gap = choose.choice((1, 5, 20, 40))
    due = choose.randint(0, 60)
    for n in range(3000):
        if world.end is not None:
            break
        if wanted > len(faults) and n >= due:
            options = possible(world, FAULTS)
            if options:
                kind = choose.choice(FAULTS)
                fault = choose.choice([o for o in options if o[0] == kind] or options)
                faults.append(fault)
                world.step(fault)
                due = n + choose.randint(1, gap)
                continue
        choices = world.choices()
        if not choices:
            world.pass_time()
        else:
            world.step(order.next(choices))
    else:
        raise AssertionError(f"the job never ends: {faults}\n" + world.story())
    judge(world, faults)


@pytest.mark.parametrize("chunk", range(8))
def test_any_order_with_up_to_three_faults(chunk: int) -> None:
    job = Job(nodes=4, spares=2)
    for seed in range(chunk * 60, chunk * 60 + 60):
        story(seed, job)


VOTING: dict[str, dict[str, Any]] = {
    "two shards": {"shards": "abab"},
    "shards of which one has no replica": {"shards": "aaab"},
    "steps that can be redone": {"redo": True},
    "redone because one keeps no collectives": {"redo": True, "cut": [2]},
    "neither": {"shards": "abab", "cut": [0]},
}


@pytest.mark.parametrize("kind", VOTING)
def test_any_order_where_all_vote(kind: str) -> None:
    for seed in range(60):
        story(seed, Job(nodes=4, spares=2), **VOTING[kind])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["no votes", *VOTING])
def test_any_order_at_length(kind: str) -> None:
    for seed in range(1000, 9000):
        story(seed, Job(nodes=4, spares=2), **VOTING.get(kind, {}))


def test_any_order_with_more_faults_than_a_small_job_can_bear() -> None:
    for seed in range(100):
        story(seed, Job(nodes=2, spares=1))
    for seed in range(30):
        story(seed, Job(nodes=1))


@pytest.mark.parametrize("unit", ["node", "rank"])
def test_any_order_with_two_ranks_a_node(unit: str) -> None:
    job = Job(nodes=2, nproc_per_node=2, spares=2, unit=unit)  # type: ignore[arg-type]
    for seed in range(80):
        story(seed, job)


def checkpoints(job: Job, **of_world: Any) -> Iterator[World]:
    """The world after each event of an undisturbed run."""
    world = World(job, TARGET, **of_world)
    while world.end is None:
        yield world.copy()
        choices = world.choices()
        if choices:
            world.step(choices[0])
        else:
            world.pass_time()


@pytest.mark.parametrize("of_world", [{}, {"shards": "abab"}, {"redo": True, "cut": [0, 1, 2, 3]}], ids=str)
def test_every_single_fault_at_every_moment(of_world: dict[str, Any]) -> None:
    job = Job(nodes=4, spares=2)
    for start in checkpoints(job, **of_world):
        for fault in possible(start, ("kill", "node", "raise")):
            world = start.copy()
            world.step(fault)
            finish(world)
            judge(world, [fault])


def explore_after(kinds: tuple[str, ...], nodes: tuple[int, ...], **of_world: Any) -> int:
    """Two ranks, one spare, one fault while training: every order of deliveries, depth first."""
    start = World(Job(nodes=2, spares=1), target=1, **of_world)
    while start.state.stage is not Stage.RUNNING or any(node.up or node.down for node in start.nodes.values()):
        start.step(start.choices()[0])
    total = 0
    for fault in possible(start, kinds):
        if fault[1] in nodes:
            world = start.copy()
            world.step(fault)
            total += explore(world)
    return total


@pytest.mark.parametrize("redo", [False, True])
def test_all_interleavings_of_a_recovery(redo: bool) -> None:
    """Steps that can be redone make the job vote."""
    assert explore_after(("node",), (1, 2), redo=redo) > 1000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_interleavings_at_length() -> None:
    assert explore_after(("kill", "node", "raise"), (0, 1, 2)) > 1000


def explore(start: World) -> int:
    seen: set[str] = set()
    stack = [start]
    while stack:
        world = stack.pop()
        key = world.key()
        if key in seen:
            continue
        seen.add(key)
        assert len(seen) < 300_000
        if world.end is not None:
            assert world.end.exit_code == 0, world.story()
            continue
        choices = world.choices()
        if not choices:
            follower = world.copy()
            for _ in range(200):
                follower.pass_time()
                if follower.end is not None or follower.choices():
                    break
            else:
                raise AssertionError("stuck:\n" + world.story())
            stack.append(follower)
        for choice in choices:
            follower = world.copy()
            follower.step(choice)
            stack.append(follower)
    return len(seen)

"""Membership in a small world: every order of events that can be afforded, with faults anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator

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


def finish(world: World, choose: random.Random | None) -> None:
    """Run to the end of the job, which must come."""
    for _ in range(3000):
        if world.end is not None:
            return
        choices = world.choices()
        if not choices:
            world.pass_time()
        elif choose is None:
            world.step(choices[0])
        elif choose.random() < 0.02:
            world.step(("tick", 0, ""))
        else:
            world.step(choose.choice(choices))
    raise AssertionError("the job never ends:\n" + world.story())


def told(world: World, faults: list[Choice]) -> str:
    return f"{world.end}\n{faults}\n{world.story()}"


def judge(world: World, faults: list[Choice]) -> None:
    assert world.end is not None
    code, reason = world.end.exit_code, world.end.reason
    assert "internal" not in reason, told(world, faults)
    if code == 0 and not all(fault[0] == "exit0" for fault in faults):
        ranks = world.state.ranks.values()
        assert all(rank.finished and rank.step == TARGET for rank in ranks), told(world, faults)
    if len(faults) <= world.job.sidecar_copies:
        assert not world.sidecar_missing, told(world, faults)
    if len(faults) <= world.job.spares and world.job.world_size > len(faults):
        assert code == 0, told(world, faults)


def story(seed: int, job: Job) -> None:
    choose = random.Random(seed)
    world = World(job, TARGET)
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
        elif choose.random() < 0.02:
            world.step(("tick", 0, ""))
        else:
            world.step(choose.choice(choices))
    else:
        raise AssertionError(f"the job never ends: {faults}\n" + world.story())
    judge(world, faults)


@pytest.mark.parametrize("chunk", range(8))
def test_any_order_with_up_to_three_faults(chunk: int) -> None:
    job = Job(nodes=4, spares=2)
    for seed in range(chunk * 60, chunk * 60 + 60):
        story(seed, job)


@pytest.mark.soak
def test_any_order_at_length() -> None:
    for seed in range(1000, 9000):
        story(seed, Job(nodes=4, spares=2))


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


def checkpoints(job: Job) -> Iterator[World]:
    """The world after each event of an undisturbed run."""
    world = World(job, TARGET)
    while world.end is None:
        yield world.copy()
        choices = world.choices()
        if choices:
            world.step(choices[0])
        else:
            world.pass_time()


def test_every_single_fault_at_every_moment() -> None:
    job = Job(nodes=4, spares=2)
    for start in checkpoints(job):
        for fault in possible(start, FAULTS):
            world = start.copy()
            world.step(fault)
            finish(world, None)
            judge(world, [fault])


def test_all_interleavings_of_a_recovery() -> None:
    """Two ranks, one spare, one fault while training: every order of deliveries, depth first."""
    start = World(Job(nodes=2, spares=1), target=1)
    while start.state.stage is not Stage.RUNNING or any(
        node.up or node.down for node in start.nodes.values()
    ):
        start.step(start.choices()[0])
    total = 0
    for fault in possible(start, ("kill", "node", "raise")):
        world = start.copy()
        world.step(fault)
        total += explore(world)
    assert total > 1000


def explore(start: World) -> int:
    seen: set[str] = set()
    stack = [start]
    while stack:
        world = stack.pop()
        key = world.key()
        if key in seen:
            continue
        seen.add(key)
        assert len(seen) < 60_000
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

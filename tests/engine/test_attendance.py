"""What a rank can tell when training stands still: which collectives it has joined, and in which it waits."""

from __future__ import annotations

import time

import torch
from torch._C import _distributed_c10d as c10d

from tests.engine.world import World

SUM = c10d.AllreduceOptions()


def test_collectives_are_numbered_within_their_step() -> None:
    world = World(2).live()
    assert world.ranks[0].backend.joined() == (-2, 0)
    for step in (-1, 3):
        for rank in world.ranks:
            rank.journal.step = step
        for _ in range(2):
            world.each(lambda rank: rank.backend.allreduce([torch.ones(4)], SUM).wait())
    assert [rank.backend.joined() for rank in world.ranks] == [(3, 2), (3, 2)]
    assert world.ranks[0].backend.oldest_wait()[0] == ""


def test_the_oldest_wait_is_told_until_it_is_over() -> None:
    world = World(2).live()
    early, late = world.ranks
    early.journal.step = late.journal.step = 5
    works = [early.backend.allreduce([torch.ones(4)], SUM), early.backend.barrier(c10d.BarrierOptions())]
    time.sleep(0.2)
    operation, step, number, seconds = early.backend.oldest_wait()
    assert (operation, step, number) == ("ALLREDUCE", 5, 0)
    assert 0.2 <= seconds < 10
    assert early.backend.joined() == (5, 2)
    assert late.backend.joined() == (-2, 0)
    works.append(late.backend.allreduce([torch.ones(4)], SUM))
    works[0].wait()
    assert early.backend.oldest_wait()[:3] == ("BARRIER", 5, 1)
    works.append(late.backend.barrier(c10d.BarrierOptions()))
    for work in works:
        work.wait()
    assert early.backend.oldest_wait()[0] == ""


def test_send_and_receive_have_no_number_and_count_for_nothing() -> None:
    world = World(2).live()
    value = torch.zeros(4)
    receiving = world.ranks[1].backend.recv([value], 0, 7)
    assert world.ranks[1].backend.oldest_wait()[:3] == ("RECV", -1, -1)
    # A collective tells more, though it is younger.
    sums = [world.ranks[1].backend.allreduce([torch.ones(4)], SUM)]
    assert world.ranks[1].backend.oldest_wait()[:3] == ("ALLREDUCE", -1, 0)
    sums.append(world.ranks[0].backend.allreduce([torch.ones(4)], SUM))
    world.ranks[0].backend.send([torch.ones(4)], 1, 7).wait()
    receiving.wait()
    for work in sums:
        work.wait()
    assert [rank.backend.joined() for rank in world.ranks] == [(-1, 1), (-1, 1)]


def test_results_are_not_kept_alive() -> None:
    world = World(1).live()
    value = torch.ones(4)

    def references() -> int:
        return torch._C._storage_Use_Count(value.untyped_storage()._cdata)

    before = references()
    world.ranks[0].backend.allreduce([value], SUM).wait()
    deadline = time.monotonic() + 5
    while references() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # the callback that let go of it may still run
    assert references() == before

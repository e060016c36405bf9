"""The C++ journal over real gloo: transparency, replay after a failure, retention, offline mode, durability hold."""

from __future__ import annotations

import resource
import socket
import struct
import threading
import time

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from tests.engine.world import World, blocked, parallel
from tpwrap.engine import _native

SUM = c10d.AllreduceOptions()


def input_of(rank: int, seed: int = 0, size: int = 1000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * seed + rank))


def all_reduce(rank, seed: int = 0) -> torch.Tensor:
    value = input_of(rank.rank, seed)
    rank.backend.allreduce([value], SUM).wait()
    return value


def expected(seed: int = 0, size: int = 3) -> torch.Tensor:
    """What bare gloo computes (not the sum in any order: the bits are gloo's)."""
    reference = World(size)
    reference.connect()
    values = [input_of(r, seed) for r in range(size)]
    parallel(lambda r: r.group.inner.allreduce([values[r.rank]], SUM).wait(), reference.ranks)
    return values[0]


@pytest.fixture(params=[False, True], ids=["futures", "polled"])
def poll(request: pytest.FixtureRequest) -> bool:
    """The polled way is the one that device backends take."""
    return bool(request.param)


def test_results_are_those_of_the_inner_backend(poll: bool) -> None:
    for result in World(3, poll).live().each(all_reduce):
        assert torch.equal(result, expected())


def test_operations_issued_before_there_is_an_inner_backend_wait_for_it() -> None:
    world = World(2)
    for rank in world.ranks:
        rank.journal.go_live()
    values = [torch.ones(4) for _ in world.ranks]
    works = [r.backend.allreduce([v], SUM) for r, v in zip(world.ranks, values, strict=True)]
    time.sleep(0.05)
    assert not any(work.is_completed() for work in works)
    world.connect()
    for work in works:
        work.wait()
    assert torch.equal(values[0], torch.full((4,), 2.0))


def test_a_lost_result_is_held_and_replayed_in_place(poll: bool) -> None:
    """One rank's completion is dropped (as when a peer dies at the very end): it blocks, the others go on, and the
    replay gives it the result that the others have, bit for bit, although its buffer had been overwritten."""
    world = World(3, poll).live()
    for rank in world.ranks:
        rank.journal.step = 0
    world.ranks[1].journal.arm(0, 0, _native.Fault.DROP)
    values = [input_of(r) for r in range(3)]
    works = [r.backend.allreduce([v], SUM) for r, v in zip(world.ranks, values, strict=True)]
    works[0].wait()
    works[2].wait()
    assert "dropped" in world.ranks[1].journal.wait_failure(10.0)
    waiting = blocked(works[1])
    for rank in world.ranks:
        rank.journal.suspend()
        assert rank.journal.drain(10.0)
        rank.group.adopt(None)
    world.connect()
    world.each(lambda r: r.journal.replay(0))
    assert all(r.journal.wait_replayed(10.0) for r in world.ranks)
    waiting.join(10.0)
    assert not waiting.is_alive()
    assert torch.equal(values[1], expected())
    assert torch.equal(values[0], expected())


def test_who_waits_for_a_failure_is_not_woken_by_operations() -> None:
    """A thread always waits for one; waking it costs more than all else that an operation costs here."""
    world = World(2).live()
    woken: list[int] = []

    def watch() -> None:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        world.ranks[0].journal.wait_failure(20.0)
        woken.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

    watching = threading.Thread(target=watch)
    watching.start()
    time.sleep(0.05)
    for _ in range(200):
        world.each(all_reduce)
    world.ranks[0].journal.close()
    watching.join(10.0)
    assert woken
    assert woken[0] < 50


def test_a_release_ends_the_wait_for_a_replay() -> None:
    """The other rank never answers it: it died in the meantime."""
    world = World(2).live()
    zero = world.ranks[0]
    for rank in world.ranks:
        rank.journal.step = 0
    world.each(all_reduce)
    for rank in world.ranks:
        rank.journal.suspend()
        rank.group.adopt(None)
    world.connect()
    zero.journal.replay(0)
    assert not zero.journal.wait_replayed(0.1)
    threading.Timer(0.1, zero.journal.suspend).start()
    began = time.monotonic()
    assert zero.journal.wait_replayed(10.0)  # over, one way or another: the next release is in the queue
    assert time.monotonic() - began < 5.0


def test_a_newcomer_is_served_finished_operations_and_pending_ones_complete() -> None:
    """Rank 2 dies after its first of two operations; a fresh rank 2 runs both from the start of the step."""
    world = World(3).live()
    for rank in world.ranks:
        rank.journal.step = 4
    assert all(torch.equal(v, expected(1)) for v in world.each(lambda r: all_reduce(r, 1)))
    survivors, dead = world.ranks[:2], world.ranks[2]
    pending = [input_of(r.rank, 2) for r in survivors]
    works = [r.backend.allreduce([v], SUM) for r, v in zip(survivors, pending, strict=True)]
    time.sleep(0.05)
    for rank in survivors:
        rank.journal.suspend()
    dead.group.adopt(None)  # its sockets close
    for rank in survivors:
        assert rank.journal.drain(10.0)
        rank.group.adopt(None)
    newcomer = World(3).ranks[2]
    world.connect([*survivors, newcomer])
    newcomer.journal.step = 4
    newcomer.journal.go_live()
    for rank in survivors:
        rank.journal.replay(4)
    first, second = all_reduce(newcomer, 1), all_reduce(newcomer, 2)
    for work in works:
        work.wait()
    assert torch.equal(first, expected(1))
    assert torch.equal(second, expected(2))
    assert all(torch.equal(v, second) for v in pending)


def test_contributions_are_kept_until_every_rank_has_reached_the_next_step() -> None:
    world = World(2).live()
    for step in range(5):
        for rank in world.ranks:
            rank.journal.step = step
        world.each(lambda r: [all_reduce(r, 1), all_reduce(r, 2)])
        for rank in world.ranks:
            assert rank.journal.stats()["entries"] == 2
    # A broadcast says nothing about the others: it must not drop anything.
    for rank in world.ranks:
        rank.journal.step = 5
    world.each(lambda r: r.backend.broadcast([torch.ones(3)], c10d.BroadcastOptions()).wait())
    assert [r.journal.stats()["entries"] for r in world.ranks] == [3, 3]


def test_memory_of_the_journal_is_reused() -> None:
    world = World(2).live()
    for step in range(30):
        for rank in world.ranks:
            rank.journal.step = step
        world.each(all_reduce)
    assert world.ranks[0].journal.stats()["bytes"] == 4000
    assert world.ranks[0].journal.stats()["peak_bytes"] <= 8000


FORMS = {
    "other-shape": lambda rank: input_of(rank, 1, 24).view(2, 3, 4),
    "other-type": lambda rank: torch.arange(12) + rank,
    "half": lambda rank: input_of(rank, 1, 48).bfloat16(),
    "transposed": lambda rank: input_of(rank, 1, 24).view(4, 6).t(),
    "slice": lambda rank: input_of(rank, 1, 30)[3:27],
    "scalar": lambda rank: input_of(rank, 1, 24).sum(),
    "large": lambda rank: input_of(rank, 1, 1 << 18),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_in_reused_memory_is_exact_whatever_the_tensors_form(form: str) -> None:
    """Earlier steps fill the pool with copies of 96 bytes; then a result is lost, and computed again from a copy."""
    world = World(2).live()
    for step in range(3):
        for rank in world.ranks:
            rank.journal.step = step
        world.each(lambda r: r.backend.allreduce([input_of(r.rank, 0, 24)], SUM).wait())
    for rank in world.ranks:
        rank.journal.step = 3
    world.ranks[0].journal.arm(3, 1, _native.Fault.DROP)
    world.each(lambda r: all_reduce(r))  # gives the copies of step 2 back to the pool
    values = [FORMS[form](r) for r in range(2)]
    works = [r.backend.allreduce([v], SUM) for r, v in zip(world.ranks, values, strict=True)]
    assert "dropped" in world.ranks[0].journal.wait_failure(10.0)
    works[1].wait()
    for rank in world.ranks:
        rank.journal.suspend()
        assert rank.journal.drain(10.0)
        rank.group.adopt(None)
    world.connect()
    world.each(lambda r: r.journal.replay(3))
    works[0].wait()
    assert torch.equal(values[0], values[1])
    assert torch.allclose(values[0].double(), (FORMS[form](0) + FORMS[form](1)).double())


def test_over_the_byte_budget_training_goes_on_but_the_step_is_not_replayable() -> None:
    world = World(2, budget=6000).live()
    for rank in world.ranks:
        rank.journal.step = 3
    world.each(lambda r: [all_reduce(r, 1), all_reduce(r, 2)])
    assert not world.ranks[0].journal.replayable(3)
    assert world.ranks[0].journal.replayable(4)


def test_a_wrong_argument_is_the_callers_error_and_no_failure() -> None:
    world = World(2).live()
    with pytest.raises((RuntimeError, ValueError)):
        world.ranks[0].backend.allgather([[torch.empty(1)]], [torch.ones(1), torch.ones(1)], c10d.AllgatherOptions())
    assert world.ranks[0].journal.wait_failure(0.05) == ""
    assert all(torch.equal(v, expected(size=2)) for v in world.each(all_reduce))


OFFLINE = {
    "allreduce": lambda b: (v := [torch.tensor([3.0])], b.allreduce(v, SUM).wait(), v[0])[-1],
    "broadcast": lambda b: (v := [torch.tensor([3.0])], b.broadcast(v, c10d.BroadcastOptions()).wait(), v[0])[-1],
    "allgather": lambda b: (
        v := [torch.empty(1) for _ in range(4)],
        b.allgather([v], [torch.tensor([3.0])], c10d.AllgatherOptions()).wait(),
        torch.cat(v),
    )[-1],
    "allgather_base": lambda b: (
        v := torch.empty(4),
        b._allgather_base(v, torch.tensor([3.0]), c10d.AllgatherOptions()).wait(),
        v,
    )[-1],
    "reduce_scatter_base": lambda b: (
        v := torch.empty(1),
        b._reduce_scatter_base(v, torch.tensor([1.0, 3.0, 2.0, 2.0]), c10d.ReduceScatterOptions()).wait(),
        v,
    )[-1],
    "barrier": lambda b: (b.barrier(c10d.BarrierOptions()).wait(), torch.tensor([3.0]))[-1],
}


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_every_operation_completes_at_once_with_sane_data(name: str) -> None:
    rank = World(4).ranks[1]
    rank.journal.go_offline()
    result = OFFLINE[name](rank.backend)
    assert torch.equal(result, torch.full_like(result, 3.0))


def test_set_up_results_are_recorded_and_served() -> None:
    world = World(2).live()
    world.each(lambda r: [all_reduce(r, 1), all_reduce(r, 2)])
    record = world.ranks[0].group.record()
    assert [len(outputs) for outputs in record] == [1, 1]
    newcomer = World(2).ranks[1]
    newcomer.journal.go_offline()
    newcomer.group.serve(record)
    assert torch.equal(all_reduce(newcomer, 1), expected(1, 2))
    assert torch.equal(all_reduce(newcomer, 2), expected(2, 2))
    assert torch.equal(all_reduce(newcomer, 3), input_of(1, 3))  # past the record: its own data
    assert newcomer.group.served_mismatches == 0


def test_nothing_is_contributed_before_buddies_have_acknowledged() -> None:
    world = World(2).live()
    ours, theirs = socket.socketpair()
    buddies = _native.Buddies(world.ranks[0].journal)
    buddies.add(ours.detach())
    assert buddies.publish(7, b"sidecar") == 1
    values = [torch.ones(1), torch.ones(1)]
    works = [r.backend.allreduce([v], SUM) for r, v in zip(world.ranks, values, strict=True)]
    assert theirs.recv(100) == b"sidecar"
    time.sleep(0.05)
    assert not works[0].is_completed()
    theirs.sendall(struct.pack("<Q", 7))
    works[0].wait()
    assert buddies.wait(1.0)
    assert values[0].item() == 2.0


def test_a_dead_buddy_does_not_hold_the_job() -> None:
    world = World(2).live()
    ours, theirs = socket.socketpair()
    buddies = _native.Buddies(world.ranks[0].journal)
    buddies.add(ours.detach())
    theirs.close()
    buddies.publish(1, b"sidecar")
    assert all(torch.equal(v, expected(size=2)) for v in world.each(all_reduce))


def test_digests_tell_bits_apart() -> None:
    a = torch.randn(1001)
    b = a.clone()
    assert _native.digests([a]) == _native.digests([b])
    b.view(torch.int32)[700] ^= 1
    assert _native.digests([a]) != _native.digests([b])
    assert _native.digests([a[:500]]) != _native.digests([a[500:1000]])
    assert _native.digests([torch.zeros(3)]) != _native.digests([torch.zeros(4)])

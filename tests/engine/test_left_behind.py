"""An operation that does not end although its communicator was aborted costs one recovery some patience, no more."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from tests.e2e.conftest import assert_equal, tpwrap
from tests.engine.world import World, blocked
from tpwrap.core import events
from tpwrap.core.timeouts import Timeouts

SUM = c10d.AllreduceOptions()


@pytest.mark.parametrize("poll", [False, True], ids=["futures", "polled"])
def test_what_is_left_behind_counts_no_more_and_is_run_again(poll: bool) -> None:
    world = World(2, poll).live()
    zero, one = world.ranks
    for rank in world.ranks:
        rank.journal.step = 0
    first, second = torch.full((3,), 1.0), torch.full((3,), 2.0)
    works = [zero.backend.allreduce([first], SUM)]  # rank 1 does not take part, and no connection is cut
    for rank in world.ranks:
        rank.journal.suspend()
    assert not zero.journal.drain(0.1)
    assert (zero.group.in_flight, one.group.in_flight) == (1, 0)
    old = [rank.group.inner for rank in world.ranks]  # kept, as `leave_behind` does
    for rank in world.ranks:
        rank.group.adopt(None)
    assert zero.journal.drain(0.0)
    world.connect()
    works.append(one.backend.allreduce([second], SUM))
    for rank in world.ranks:
        rank.journal.replay(0)
    for work in works:
        waiting = blocked(work)
        waiting.join(10.0)
        assert not waiting.is_alive()
    assert first.tolist() == second.tolist() == [3.0] * 3
    # Should it end after all, it is not taken for an operation of the new communicator.
    old[1].allreduce([torch.zeros(3)], SUM).wait()
    time.sleep(0.1)
    again = world.each(lambda r: (v := torch.ones(3), r.backend.allreduce([v], SUM).wait())[0])
    assert [v.tolist() for v in again] == [[2.0] * 3] * 2
    assert zero.journal.drain(10.0)
    assert zero.journal.stats()["in_flight"] == 0


def test_a_run_with_an_operation_left_behind(tmp_path: Path) -> None:
    """The first recovery waits for it in vain, twice; the second one finds nothing to wait for."""
    limit = 5.0
    options = {"nodes": 3, "options": ("--failure-timeout", str(limit)), "command": (sys.executable, "-m")}
    script = ["tests.engine.left_behind"]
    undisturbed = tpwrap(tmp_path / "undisturbed", script, **options)
    assert undisturbed.code == 0, undisturbed.output[-6000:]
    faults = [f"rank=1 step={step} phase=backward kill" for step in (3, 6)]
    run = tpwrap(tmp_path / "run", script, faults, **options)
    assert_equal(run, undisturbed, {1}, 3)
    assert run.output.count("left behind") == 1, run.output
    patience = Timeouts.derive(limit).release / 5
    first, second = (event.stages["release"] for event in run.of(events.FailoverFinished))
    assert first >= 2 * patience
    assert second < patience

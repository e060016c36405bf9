"""The measure of correctness: a run with failures gives, bit for bit, the numbers of the run without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import EXAMPLE, RANKS, assert_equal, tpwrap
from tpwrap.core import events

# One run takes a failure in every phase, each in a step of its own: what is wrong after one of them stays wrong.
PHASES = {
    "gpt": {
        "setup": None,
        "forward": 1,  # DDP rebuilds its buckets in this forward
        "between": 2,
        "backward": 4,
        "commit": 5,  # the update is applied, the log line not yet written
        "optimizer": 7,
        "collective:0": 9,  # the bucket's all-reduce
        "collective:1": 10,  # after the collective in the body's tail, which follows the update
    },
    "digits": {
        "backward": 0,  # before the first good step: DDP has not rebuilt its buckets
        "forward": 1,
        "between": 3,
        "collective:0": 8,  # the evaluation's collective
        "optimizer": 11,
        "commit": 15,  # the last step of an epoch: evaluation and checkpoint follow
        "collective:2": 24,  # after the last step
    },
}


@pytest.mark.parametrize("victim", [0, 1, RANKS - 1])
@pytest.mark.parametrize("example", EXAMPLE)
def test_a_rank_killed_in_every_phase(example: str, victim: int, tmp_path: Path, undisturbed) -> None:
    """Only processes die: each is replaced by the warm one in its own slot, and no spare is spent."""
    faults = [
        f"rank={victim} {'' if step is None else f'step={step}'} phase={phase} kill"
        for phase, step in PHASES[example].items()
    ]
    run = tpwrap(tmp_path, EXAMPLE[example], faults)
    assert_equal(run, undisturbed(example, EXAMPLE[example]), {victim})
    assert run.of(events.JobEnded)[0].failovers == len(faults)
    healed = run.of(events.FailoverFinished)
    assert all(move.same_slot for event in healed for move in event.moves)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("victim", [0, 1, RANKS - 1])
@pytest.mark.parametrize("example", EXAMPLE)
def test_the_node_of_a_rank_killed_in_every_phase(
    example: str, victim: int, half: int, tmp_path: Path, undisturbed
) -> None:
    """Supervisor and workers die at once; a spare node takes over, four times in a row."""
    phases = list(PHASES[example].items())[half::2]
    # The rank moves: first on node `victim`, then on the spares in their order.
    hosts = [victim, *range(RANKS, RANKS + len(phases) - 1)]
    faults = [
        f"node={node} {'' if step is None else f'step={step}'} phase={phase} kill"
        for node, (phase, step) in zip(hosts, phases, strict=True)
    ]
    run = tpwrap(tmp_path, EXAMPLE[example], faults, spares=len(phases))
    assert_equal(run, undisturbed(example, EXAMPLE[example]), {victim})
    assert run.of(events.JobEnded)[0].failovers == len(faults)
    healed = run.of(events.FailoverFinished)
    assert not any(move.same_slot for event in healed for move in event.moves)


@pytest.mark.parametrize("kind", ["rank", "node"])
def test_two_at_once(kind: str, tmp_path: Path, undisturbed) -> None:
    faults = [f"{kind}={victim} step=5 phase=backward kill" for victim in (1, 2)]
    run = tpwrap(tmp_path, EXAMPLE["gpt"], faults, spares=2)
    assert_equal(run, undisturbed("gpt", EXAMPLE["gpt"]), {1, 2})


@pytest.mark.parametrize("victim", [0, 3])
def test_a_split_commit(victim: int, tmp_path: Path, undisturbed) -> None:
    """Rank 2 loses the result of the last collective of step 5 while the others complete it and apply the update; then
    the victim dies. Two survivors hold step 6, one holds step 5."""
    faults = ["rank=2 step=5 phase=collective:0 drop", f"rank={victim} step=5 phase=commit kill"]
    run = tpwrap(tmp_path, EXAMPLE["gpt"], faults)
    assert_equal(run, undisturbed("gpt", EXAMPLE["gpt"]), {victim})


def test_a_failed_collective_without_a_death_is_healed(tmp_path: Path, undisturbed) -> None:
    run = tpwrap(tmp_path, EXAMPLE["gpt"], ["rank=1 step=5 phase=collective:0 drop"])
    assert_equal(run, undisturbed("gpt", EXAMPLE["gpt"]))
    assert [event.ranks for event in run.of(events.FailoverFinished)] == [[]]


@pytest.mark.parametrize(
    "second",
    [f"rank=2 phase=recovery:{stage} kill" for stage in ("release", "rebuild", "verify", "resume")]
    + [f"rank=1 phase=recovery:{stage} kill" for stage in ("restore", "verify", "resume")]
    + ["node=2 phase=recovery:rebuild kill", "node=4 phase=recovery:restore kill"],
)
def test_a_second_failure_in_each_stage_of_a_recovery(second: str, tmp_path: Path, undisturbed) -> None:
    """rank 2 is a survivor; rank 1 is the newcomer that replaces the first victim (on node 4 when its node died)."""
    first = "node=1" if second.startswith("node") else "rank=1"
    run = tpwrap(tmp_path, EXAMPLE["gpt"], [f"{first} step=5 phase=backward kill", second], spares=2)
    assert_equal(run, undisturbed("gpt", EXAMPLE["gpt"]), {1, 2})
    assert len(run.of(events.FaultInjected)) == 2


@pytest.mark.parametrize("action", ["exception", "exit", "stop"])
def test_other_ways_to_fail(action: str, tmp_path: Path, undisturbed) -> None:
    run = tpwrap(
        tmp_path,
        EXAMPLE["gpt"],
        [f"rank=1 step=5 phase=backward {action}"],
        options=("--failure-timeout", "2"),
    )
    assert_equal(run, undisturbed("gpt", EXAMPLE["gpt"]), {1})

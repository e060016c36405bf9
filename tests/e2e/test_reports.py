"""What users of other systems lost at a failure, each in the scenario in which they met it: here nothing is lost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch

from tests.e2e.conftest import SCRIPTS, Run, assert_equal, tpwrap
from tests.e2e.scripts.variants import digest
from tpwrap.core import events
from tpwrap.report import compare

RANKS, STEPS = 3, 8
LRS, WARM_UP = (0.02, 0.004, 0.02), 6
FIRST_SCALE = 2.0**20
MICRO_BATCHES, BATCH = 4, 4


def script(case: str, *places: str) -> list[str]:
    die = [word for place in places for word in ("--die", place)]
    return [str(SCRIPTS / "reports.py"), "--case", case, *die]


def undisturbed_of(undisturbed: Any, case: str, ranks: int = RANKS) -> Run:
    run: Run = undisturbed(f"report-{case}", script(case), nodes=ranks)
    return run


def healed(
    tmp_path: Path,
    undisturbed: Any,
    script_: list[str],
    faults: list[str],
    replaced: set[int],
    failures: int,
    ranks: int = RANKS,
    spares: int = 0,
) -> Run:
    """The run with failures, equal to the one without; all of them happened."""
    oracle = undisturbed_of(undisturbed, script_[2], ranks)
    run = tpwrap(tmp_path, script_, faults, nodes=ranks, spares=spares)
    assert_equal(run, oracle, replaced, ranks)
    assert len(run.of(events.RankFailed)) == failures
    return run


def lines(run: Run) -> dict[int, list[dict[str, Any]]]:
    """rank -> its record of each step, in order"""
    steps = compare.read(run.results).steps
    return {rank: [steps[rank][step] for step in range(1, STEPS + 1)] for rank in steps}


def note(run: Run, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.results / f"note{rank}.txt").read_text())
    return found


def test_the_learning_rate_of_a_replacement_in_a_warm_up(tmp_path: Path, undisturbed) -> None:
    """https://github.com/pytorch/torchtitan/pull/4598: a replica that joined in the middle of the schedule got a
    learning rate out of a cached state dict, and its weights left those of the others."""
    faults = ["rank=1 step=2 phase=backward kill", "rank=2 step=3 phase=optimizer kill"]
    run = healed(tmp_path, undisturbed, script("scaled"), faults, {1, 2}, 2)
    expected = [[lr * min(1.0, (step + 1) / WARM_UP) for lr in LRS] for step in range(1, STEPS + 1)]
    for rank, records in lines(run).items():
        assert [record["lrs"] for record in records] == expected, f"rank {rank}"


def test_the_scale_of_a_scaler(tmp_path: Path, undisturbed) -> None:
    """https://github.com/huggingface/transformers/issues/34053: the scaler began again at its first scale, so the next
    gradients overflowed, and an update and a step of the schedule were left out that the first run had made."""
    faults = [
        f"rank={rank} step={step} phase={phase} kill"
        for rank, step, phase in ((1, 1, "forward"), (1, 4, "backward"), (0, 6, "commit"))
    ]
    run = healed(tmp_path, undisturbed, script("scaled"), faults, {0, 1}, 3)
    of_rank = lines(run)
    kept = [[(one["scale"], one["growth"], one["batch"]) for one in records] for records in of_rank.values()]
    assert kept[0] == kept[1] == kept[2]
    scales = [scale for scale, *_ in kept[0]]
    assert max(scales) < FIRST_SCALE, "the first scale overflows"
    assert any(after > before for before, after in itertools.pairwise(scales)), "it never grew"
    assert kept[0][-1][-1] >= STEPS, "some batch made no update"
    assert len({json.dumps(run.final(rank)["scaler"]) for rank in range(RANKS)}) == 1


def test_the_next_batch(tmp_path: Path, undisturbed) -> None:
    """https://github.com/meta-pytorch/torchft/issues/309: a replica came back one batch behind, and the job waited at
    the end for the batch that only this one had left. Here in the first epoch, at its end, and in the second."""
    faults = [f"rank={rank} step={step} phase={phase} kill"
              for rank, step, phase in ((1, 2, "between"), (2, 4, "between"), (1, 6, "commit"))]  # fmt: skip
    run = healed(tmp_path, undisturbed, script("accumulated"), faults, {1, 2}, 3)
    of_rank = lines(run)
    for first in (0, STEPS // 2):
        window = [record for records in of_rank.values() for record in records[first : first + STEPS // 2]]
        served = [index for record in window for index in record["samples"]]
        assert sorted(served) == list(range(len(served))), "a sample was left out or came twice in an epoch"
        assert all(len(record["samples"]) == MICRO_BATCHES * BATCH for record in window)


def test_accumulated_gradients(tmp_path: Path, undisturbed) -> None:
    """https://github.com/meta-pytorch/torchft/issues/192: a failure in one micro-batch threw away the gradients that
    all replicas had accumulated in this step. A survivor here computes no micro-batch twice."""
    places = ["second-micro-batch", "third-micro-batch"]
    run = healed(tmp_path, undisturbed, script("accumulated", *places), [], {0, 1}, 2)
    survivor = note(run, 2)
    assert survivor["passes"] == STEPS * MICRO_BATCHES
    assert len(survivor["gradients"]) == STEPS
    assert survivor["gradients"] == note(undisturbed_of(undisturbed, "accumulated"), 2)["gradients"]


def test_pending_operations_in_several_groups(tmp_path: Path, undisturbed) -> None:
    """https://github.com/pytorch/pytorch/issues/119797: with operations pending in two process groups and a dead peer,
    aborting one NCCL communicator after the other hung. Here the same with gloo, in three groups."""
    run = healed(tmp_path, undisturbed, script("communicating", "pending"), [], {1}, 1)
    assert run.of(events.FailoverFinished)[0].step == 3


def test_sends_and_receives_in_flight(tmp_path: Path, undisturbed) -> None:
    """https://github.com/pytorch/pytorch/issues/150690: aborting hung where one NCCL process group had a communicator
    for each pair of ranks, with sends and receives in flight. Here gloo's pairs, with both directions in flight."""
    run = healed(tmp_path, undisturbed, script("communicating", "in-the-ring"), [], {2}, 1)
    for rank in (0, 1):
        assert note(run, rank) == note(undisturbed_of(undisturbed, "communicating"), rank), "another step's message"


def test_a_known_death_is_not_waited_for(tmp_path: Path, undisturbed) -> None:
    """https://github.com/meta-pytorch/torchft/issues/164: it was known that a replica was dead, and the healthy ones
    waited for the full timeout of the collective. Here that is an hour."""
    run = healed(tmp_path, undisturbed, script("communicating"), ["rank=2 step=2 phase=collective:1 kill"], {2}, 1)
    finished = run.of(events.FailoverFinished)
    assert [event.step for event in finished] == [2]
    assert finished[0].seconds < 60.0


def test_a_death_inside_the_first_backward(tmp_path: Path, undisturbed) -> None:
    """https://github.com/pytorch/pytorch/issues/149418: an abort from another thread while autograd was in a backward
    pass (the first above all) ended the survivor with a segmentation fault. There NCCL, here gloo."""
    run = healed(tmp_path, undisturbed, script("backward", "first-backward", "later-backward"), [], {1, 2}, 2)
    assert [event.step for event in run.of(events.FailoverFinished)] == [-1, 4]  # before the first update: from set-up


def test_groups_are_made_and_destroyed_after_aborts(tmp_path: Path, undisturbed) -> None:
    """https://github.com/pytorch/pytorch/issues/151159: after an abort, process groups could be neither destroyed nor
    made. Here after two failures, one right after another, and a third inside the second's recovery."""
    faults = ["rank=1 step=2 phase=backward kill", "rank=2 step=3 phase=collective:0 kill"]
    faults.append("rank=1 phase=recovery:rebuild kill")
    run = healed(tmp_path, undisturbed, script("backward"), faults, {1, 2}, 3)
    assert "Traceback" not in run.output


def test_the_node_of_rank_0(tmp_path: Path, undisturbed) -> None:
    """https://github.com/pytorch/pytorch/pull/167302: when the host of rank 0 died, its address stayed in the store as
    MASTER_ADDR, and nobody found each other again. Here the store is outside of the workers: with rank 0 its whole node
    dies, all keep the address, and a group that is made later finds its members."""
    run = healed(tmp_path, undisturbed, script("backward"), ["node=0 step=3 phase=backward kill"], {0}, 1, spares=1)
    assert [move.to_node for event in run.of(events.FailoverFinished) for move in event.moves] == [RANKS]
    assert len({json.dumps(note(run, rank)["store"]) for rank in range(RANKS)}) == 1


def test_checkpoints_and_a_death_in_a_sharded_forward(tmp_path: Path, undisturbed) -> None:
    """https://github.com/pytorch/torchtitan/pull/4754: the state for a replacement was exported by another thread while
    FSDP2 had gathered the parameters for a forward pass, and the survivor crashed or went on with wrong weights. Here a
    rank dies in that pass, another one while it saves; every checkpoint holds the weights of its step."""
    run = healed(tmp_path, undisturbed, script("saved", "forward", "saving"), [], {0, 1}, 2, ranks=4)
    for rank, records in lines(run).items():
        for step in range(2, STEPS + 1, 2):
            saved = torch.load(run.results / f"checkpoint-{step}-{rank}.pt")
            assert saved["step"] == step
            assert all(bool(value.isfinite().all()) for value in saved["shards"].values())
            assert digest(saved["shards"]) == records[step - 1]["shards"]

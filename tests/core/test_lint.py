"""What is said of a script, finding by finding, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from tpwrap.core.lint import (
    Facts,
    Finding,
    Large,
    Loader,
    Model,
    Place,
    Told,
    judge,
    news,
    recognised,
    render,
    size,
    unprotected,
)

GOOD = Facts(
    script="train.py",
    step=1,
    world_size=4,
    loaders=(Loader(samples=384),),
    models=(Model("Net", 1_200_000, "DDP"),),
    optimizers=("AdamW",),
    schedulers=("CosineAnnealingLR",),
    buddies=2,
    sidecar_bytes=300,
)


def but(**changes: Any) -> Facts:
    return msgspec.structs.replace(GOOD, **changes)


def block(facts: Facts) -> list[str]:
    return render(facts, judge(facts))


def test_a_script_without_findings() -> None:
    assert block(GOOD) == [
        "train.py as it is: 1 loader (384 samples), 1 model (DDP, 1.2 M parameters), AdamW, CosineAnnealingLR",
        "protected: weights, optimizer, schedule, random state, place in the data, the script's variables; "
        "0.3 kB a step to 2 buddies",
    ]


def test_a_script_with_the_two_lines_is_promised_no_variables() -> None:
    facts = but(session=True, buddies=1, schedulers=(), scalers=("GradScaler",))
    assert block(facts) == [
        "train.py with the two lines: 1 loader (384 samples), 1 model (DDP, 1.2 M parameters), AdamW, GradScaler",
        "protected: weights, optimizer, loss scale, random state, place in the data, what is registered; "
        "0.3 kB a step to a buddy",
    ]


def test_only_what_was_recognised_is_promised() -> None:
    facts = Facts(script="train.py", step=1, world_size=2, buddies=1)
    assert block(facts) == [
        "train.py as it is: nothing",
        "protected: random state, the script's variables",
    ]


@dataclass
class Case:
    changes: dict[str, Any]
    line: str
    """of the block, whole"""
    level: str = "unprotected"
    hopeless: bool = False
    """nothing can be healed, so nothing is promised"""


CASES = {
    "large": Case(
        {"large": (Large("outputs", 4_200_000, "train.py:57"),)},
        "NOT protected: `outputs` (4.2 MB) is read after backward() (train.py:57): compute what you need of it before "
        "backward(), or use the two lines (tpwrap.session, tp.batches)",
    ),
    "from the update": Case(
        {"from_update": (Place("norm", "train.py:61"),)},
        "NOT protected: `norm` comes from gradients or parameters and is read after optimizer.step() (train.py:61): "
        "read it before optimizer.step()",
    ),
    "from the update, without a name": Case(
        {"from_update": (Place(""),)},
        "NOT protected: a value comes from gradients or parameters and is read after optimizer.step(): "
        "read it before optimizer.step()",
    ),
    "drawn": Case(
        {"drawn_in_update": (Place("", "train.py:58"),)},
        "NOT protected: random numbers are drawn between backward() and the end of optimizer.step() (train.py:58): "
        "draw them before backward()",
    ),
    "closure": Case(
        {"closures": (Place("", "train.py:58"),)},
        "NOT protected: optimizer.step(closure) runs backward() inside the update (train.py:58): compute the loss and "
        "call backward() before optimizer.step()",
        hopeless=True,
    ),
    "sharded": Case(
        {"models": (Model("Net", 5, "", "FSDP2", "train.py:40"),)},
        "NOT protected: Net is sharded (FSDP2), which a script as it is cannot carry over a failure (train.py:40): add "
        "the two lines of tpwrap.session (docs/sharded.md)",
        hopeless=True,
    ),
    "one rank": Case(
        {"world_size": 1},
        "NOT protected: the job has one rank, so no other one has a copy of its weights: run two ranks or more, or "
        "write checkpoints",
        hopeless=True,
    ),
    "journal": Case(
        {"journal_bytes": 3_000_000_000, "journal_budget": 2048 << 20},
        "NOT protected: the collectives of a step take 3.0 GB, more than the 2.1 GB that may be kept for replay: set "
        "TORCHPASS_REPLAY_BUDGET_MB=5723 if the hosts have that memory for each rank",
        hopeless=True,
    ),
    "of another part": Case(
        {"others": (Finding("unprotected", "files", "`log.txt` is opened for reading and writing", "t.py:3", "do x"),)},
        "NOT protected: `log.txt` is opened for reading and writing (t.py:3): do x",
    ),
    "no DDP": Case(
        {"models": (Model("Net", 5, where="train.py:40"),)},
        "note: Net is not wrapped in DistributedDataParallel (train.py:40): healing needs its weights to be equal on "
        "all ranks; where they are not, the first recovery ends the job with exit code 70",
        "note",
    ),
    "workers": Case(
        {"loaders": (Loader(workers=1, where="train.py:31"),)},
        "note: a loader with 1 worker (train.py:31): a newcomer fetches the earlier batches of the pass and drops them",
        "note",
    ),
    "persistent workers": Case(
        {"loaders": (Loader(workers=2, persistent=True, where="train.py:31"),)},
        "note: persistent workers (train.py:31): exact only if the data set draws no random numbers, since what "
        "workers drew in earlier passes is lost; give persistent_workers=False where it does",
        "note",
    ),
    "iterable": Case(
        {"loaders": (Loader("iterable", where="train.py:31"),)},
        "note: an IterableDataset (train.py:31): a newcomer fetches the earlier batches of the pass and drops them, "
        "and what the data set yields must not depend on random numbers drawn in the training process",
        "note",
    ),
    "thread": Case(
        {"threads": (Place("monitor", "train.py:20"),)},
        "note: `monitor` is a thread of the script (train.py:20): a newcomer starts it anew; it must not change what "
        "the training computes",
        "note",
    ),
    "slow": Case(
        {"forward_seconds": 0.02, "step": 3},
        "note: a newcomer runs the script's own code for all earlier steps, about 200 s after 10,000 steps: to save "
        "that, use the two lines (tpwrap.session, tp.batches)",
        "note",
    ),
    "long tape": Case(
        {"tape_bytes": 200_000.0},
        "note: each buddy keeps a record of this rank that is 2.0 GB after 10,000 steps: read fewer numbers (.item(), "
        ".tolist(), .numpy()) in each step, or use the two lines (tpwrap.session, tp.batches)",
        "note",
    ),
    "no buddy": Case(
        {"buddies": 0},
        "note: all ranks are on one node, and nobody else keeps their random state and variables: the loss of a "
        "process can be healed, the loss of the node cannot: add nodes or spares",
        "note",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_findings(case: Case) -> None:
    lines = block(but(**case.changes))
    assert case.line in lines
    assert len(unprotected(judge(but(**case.changes)))) == (case.level == "unprotected")
    assert any(line.startswith("protected: ") for line in lines) != case.hopeless


@pytest.mark.parametrize(
    "changes",
    [
        {"journal_bytes": 1000, "journal_budget": 1000},
        {"journal_bytes": 1000, "journal_budget": 0},
        {"forward_seconds": 0.001, "tape_bytes": 1000.0},
        {"forward_seconds": 1.0},  # in the first update
        {"forward_seconds": 1.0, "step": 3, "tape_bytes": 1e9, "session": True},  # there, nothing is fast-forwarded
    ],
)
def test_what_is_within_its_bounds_is_not_mentioned(changes: dict[str, Any]) -> None:
    assert [finding for finding in judge(but(**changes)) if finding.level != "protected"] == []


def test_what_is_unprotected_comes_before_notes_and_once() -> None:
    facts = but(loaders=(Loader(workers=2), Loader(workers=2)), large=(Large("a", 1), Large("b", 1), Large("a", 2)))
    levels = [finding.level for finding in judge(facts)]
    assert levels == ["protected"] * 6 + ["unprotected"] * 2 + ["note"]


def test_what_was_recognised() -> None:
    loaders = (Loader("iterable", sampler="MySampler"), Loader("own"), Loader(samples=3), Loader(samples=4))
    facts = but(adapters=("Accelerate",), loaders=loaders, models=(Model("A", 999), Model("B", 7_300, "DDP", "FSDP2")))
    assert recognised(facts) == (
        "Accelerate, 4 loaders (IterableDataset, MySampler; an iterable of the script; 3 samples; …), "
        "2 models (999 parameters; FSDP2, 7.3 k parameters), AdamW, CosineAnnealingLR"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(300, "0.3 kB"), (99_949, "99.9 kB"), (100_000, "0.1 MB"), (4_200_000, "4.2 MB"), (3_000_000_000, "3.0 GB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


# --- what is told when ----------------------------------------------------------------------------------

OUTPUTS = Large("outputs", 4_200_000, "train.py:57")
CACHE = Large("cache", 1_000_000, "train.py:70")


def told(*said: tuple[int, Facts]) -> list[tuple[int, list[str]]]:
    """What is told upon facts of ranks, in order: (rank, lines)."""
    state, out = Told(), []
    for rank, facts in said:
        state, reports = news(state, rank, facts)
        out += [(report.rank, report.lines) for report in reports]
    return out


def test_the_block_is_told_once_whatever_the_number_of_ranks_and_of_times() -> None:
    facts = but(large=(OUTPUTS,))
    out = told((0, facts), (1, facts), (0, facts), (2, facts))
    assert out == [(0, block(facts))]


def test_other_ranks_wait_for_rank_0_and_add_what_only_they_have() -> None:
    out = told((1, but(large=(OUTPUTS, CACHE))), (2, but(large=(OUTPUTS, CACHE))), (0, but(large=(OUTPUTS,))))
    assert out[0] == (0, block(but(large=(OUTPUTS,))))
    assert [rank for rank, _ in out] == [0, 1]
    assert out[1][1][0].startswith("rank 1: NOT protected: `cache` (1.0 MB)")
    assert len(out[1][1]) == 1


def test_a_rank_is_not_named_for_what_rank_0_may_be_about_to_say() -> None:
    later = but(step=3, large=(OUTPUTS,))
    out = told((0, GOOD), (1, later), (0, later), (2, but(step=3, large=(CACHE,))))
    assert [(rank, lines[0].partition(": ")[0]) for rank, lines in out[1:]] == [(1, "NOT protected"), (2, "rank 2")]


def test_what_is_known_later_is_told_then_and_notes_of_other_ranks_are_not() -> None:
    later = but(step=3, large=(OUTPUTS,), threads=(Place("t"),))
    out = told((0, GOOD), (1, but(threads=(Place("u"),))), (0, later))
    assert [rank for rank, _ in out] == [0, 0]
    assert [line.partition(": ")[0] for line in out[1][1]] == ["NOT protected", "note"]

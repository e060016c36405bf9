"""The second way over a failure: a step whose collectives are not kept runs again, and every bit is as without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import SCRIPTS, assert_equal, tpwrap
from tpwrap.core import events

SMALL = {"hsdp": "0.012", "ddp": "0.006"}
"""megabytes: what the evaluation and the tail of a step need, and not the step itself"""


def little(kind: str) -> dict[str, str]:
    return {"TORCHPASS_REPLAY_BUDGET_MB": SMALL[kind]}


def script(kind: str, form: str) -> list[str]:
    return [str(SCRIPTS / "redo.py"), "--kind", kind, "--form", form]


def redone(tmp_path: Path, undisturbed, kind: str, form: str, faults: list[str], replaced: set[int]) -> list[str]:
    """Run it with faults; returns the way of each failover."""
    oracle = undisturbed(f"redo-{kind}-{form}", script(kind, form), variables=little(kind))
    run = tpwrap(tmp_path, script(kind, form), faults, spares=1, variables=little(kind))
    assert_equal(run, oracle, replaced)
    return [event.way for event in run.of(events.FailoverFinished)]


PHASES = ["forward", "collective:2", "backward", "optimizer", "commit", "between"]
FORMS = [("hsdp", "function"), ("hsdp", "block"), ("ddp", "function")]
KILLS = [
    pytest.param(*form, phase, marks=[pytest.mark.soak] if (i + j) % 3 else [], id=f"{'-'.join(form)}-{phase}")
    for i, form in enumerate(FORMS)
    for j, phase in enumerate(PHASES)
]


@pytest.mark.parametrize(("kind", "form", "phase"), KILLS)
def test_a_kill(kind: str, form: str, phase: str, tmp_path: Path, undisturbed) -> None:
    ways = redone(tmp_path, undisturbed, kind, form, [f"rank=1 step=5 phase={phase} kill"], {1})
    # After the commit nothing of the next step may have been issued yet.
    assert ways in ([["redo"], ["replay"]] if phase == "commit" else [["redo"]])


@pytest.mark.parametrize("form", ["function", "block"])
def test_one_after_another(form: str, tmp_path: Path, undisturbed) -> None:
    """A survivor of the first is lost in the second, and the newcomer redoes its steps as the others do."""
    faults = [f"rank={rank} step={step} phase=backward kill" for rank, step in ((1, 3), (2, 5), (0, 10))]
    assert redone(tmp_path, undisturbed, "hsdp", form, faults, {0, 1, 2}) == ["redo"] * 3


@pytest.mark.parametrize(
    "stage", ["rebuild", "resume", *(pytest.param(stage, marks=pytest.mark.soak) for stage in ("release", "verify"))]
)
def test_a_second_failure_while_the_first_is_healed(stage: str, tmp_path: Path, undisturbed) -> None:
    faults = ["rank=1 step=5 phase=backward kill", f"rank=2 phase=recovery:{stage} kill"]
    ways = redone(tmp_path, undisturbed, "hsdp", "function", faults, {1, 2})
    assert set(ways) == {"redo"}


def test_in_the_first_step(tmp_path: Path, undisturbed) -> None:
    """Before the first update, too; there DDP would still change its buckets, HSDP has none."""
    assert redone(tmp_path, undisturbed, "hsdp", "function", ["rank=3 step=0 phase=optimizer kill"], {3}) == ["redo"]


def test_in_an_evaluation_nothing_is_redone(tmp_path: Path, undisturbed) -> None:
    """Its collectives, which come before the body of the next step, are kept: the survivors stay inside them."""
    fault = "rank=1 step=6 phase=collective:2 kill"
    assert redone(tmp_path, undisturbed, "hsdp", "function", [fault], {1}) == ["replay"]


def test_what_fits_is_replayed(tmp_path: Path, undisturbed) -> None:
    oracle = undisturbed("redo-hsdp-function", script("hsdp", "function"), variables=little("hsdp"))
    run = tpwrap(tmp_path, script("hsdp", "function"), ["rank=1 step=5 phase=backward kill"], spares=1)
    assert_equal(run, oracle, {1})
    assert [event.way for event in run.of(events.FailoverFinished)] == ["replay"]

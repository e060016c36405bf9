"""The ways in which users write a training script, each with three kills in one run, bit-equal to the run without."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import SCRIPTS, Run, assert_equal, tpwrap
from tpwrap.core import events

RANKS = 3
KILLS = ["rank=1 step=1 phase=backward kill", "rank=0 step=4 phase=collective:0 kill"]
LATE = "rank=1 step=6 phase=optimizer kill"


def variant(kind: str) -> list[str]:
    return [str(SCRIPTS / "variants.py"), "--kind", kind]


def oracle(undisturbed: Callable[..., Run], kind: str) -> Run:
    return undisturbed(f"variant-{kind}", variant(kind), nodes=RANKS)


def assert_healed(run: Run, failures: int) -> None:
    assert run.of(events.JobEnded)[0].failovers == failures


@pytest.mark.parametrize(
    "kind",
    [
        "views", "static", "unused", "unused-zeros", "norms", "by-hand", "groups", "registered",
        "workers", "two-loaders",
    ],
)  # fmt: skip
def test_a_variant(kind: str, tmp_path: Path, undisturbed) -> None:
    faults = [*KILLS, LATE]
    run = tpwrap(tmp_path, variant(kind), faults, nodes=RANKS)
    assert_equal(run, oracle(undisturbed, kind), {0, 1}, RANKS)
    assert_healed(run, len(faults))


def test_killed_between_micro_batches(tmp_path: Path, undisturbed) -> None:
    """In the second of three: before its backward, and after it."""
    run = tpwrap(tmp_path, [*variant("accumulate"), "--die"], [LATE], nodes=RANKS)
    assert_equal(run, oracle(undisturbed, "accumulate"), {0, 1}, RANKS)
    assert_healed(run, 3)


def test_a_death_after_the_process_group_is_destroyed(tmp_path: Path, undisturbed) -> None:
    run = tpwrap(tmp_path, [*variant("ending"), "--die"], KILLS[1:], nodes=RANKS)
    assert_equal(run, oracle(undisturbed, "ending"), {0, 1}, RANKS)
    assert_healed(run, 2)


def test_a_script_that_prints_a_lot_started_as_a_module(tmp_path: Path, undisturbed) -> None:
    run = tpwrap(
        tmp_path,
        ["tests.e2e.scripts.variants", "--kind", "chatter"],
        KILLS,
        nodes=RANKS,
        command=(sys.executable, "-m"),
    )
    assert_equal(run, oracle(undisturbed, "chatter"), {0, 1}, RANKS)
    assert_healed(run, len(KILLS))
    lines = set(re.findall(r"rank (\d) step (\d) line (\d+) \.{60}$", run.output, re.MULTILINE))
    complete = {(str(2), str(step), f"{number:05d}") for step in range(1, 9) for number in range(2000)}
    assert complete <= lines, "the survivor's lines are not all there"


def test_started_through_a_shell_script(tmp_path: Path, undisturbed) -> None:
    run = tpwrap(tmp_path, [str(SCRIPTS / "run.sh"), "--kind", "views"], KILLS, nodes=RANKS, command=("bash",))
    assert_equal(run, oracle(undisturbed, "views"), {0, 1}, RANKS)
    assert_healed(run, len(KILLS))

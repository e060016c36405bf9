"""Replicas compared while they train: --check-every."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import RANKS, SCRIPTS, Run, processes_of, tpwrap
from tpwrap.core import events

FLIPS = str(SCRIPTS / "flips.py")
EVERY = ("--check-every", "1")
KIND = {"session": ["--session"], "as it is": []}


def last_line(run: Run) -> str:
    assert processes_of(run.run_dir) == {}
    return run.output.strip().splitlines()[-1]


def results(run: Run) -> list[str]:
    assert run.code == 0, run.output
    return [(run.results / f"rank{rank}").read_text() for rank in range(RANKS)]


@pytest.mark.parametrize("kind", KIND)
def test_a_bit_that_flips_is_found_at_the_next_check(tmp_path: Path, kind: str) -> None:
    run = tpwrap(tmp_path, [FLIPS, *KIND[kind], "--flip", "2"], options=EVERY)
    assert run.code == 70, run.output
    line = last_line(run)
    assert "rank 2 (node 2) differs from ranks 0, 1, 3 after update 5 in " in line
    assert "3.weight. They were equal after update 4. " in line
    assert "from a checkpoint of update 4 or before" in line
    assert not run.of(events.FailoverStarted)


def test_it_is_found_at_the_last_update_and_between_rare_checks(tmp_path: Path) -> None:
    run = tpwrap(tmp_path / "last", [FLIPS, "--session", "--flip", "0", "--before", "12"], options=EVERY)
    assert run.code == 70, run.output
    assert "rank 0 (node 0) differs from ranks 1, 2, 3 after update 12 in " in last_line(run)
    run = tpwrap(tmp_path / "rare", [FLIPS, "--session", "--flip", "2"], variables={"TORCHPASS_CHECK_EVERY": "3"})
    assert run.code == 70, run.output
    assert "after update 6 in " in last_line(run)
    assert "They were equal after update 3. " in last_line(run)


def test_a_recovery_finds_it_without_checks(tmp_path: Path) -> None:
    script = [FLIPS, "--session", "--flip", "2"]
    run = tpwrap(tmp_path, script, ["rank=0 step=8 phase=backward kill"])
    assert run.code == 70, run.output
    line = last_line(run)
    assert "generation 1 cannot go on: rank" in line
    assert "rank 2" in line
    assert " after update 8 in " in line
    assert "3.weight" in line


@pytest.mark.parametrize("kind", KIND)
def test_who_is_well_is_not_disturbed(tmp_path: Path, kind: str) -> None:
    """Nor is a rank that was replaced taken for one that differs."""
    script = [FLIPS, *KIND[kind]]
    expected = results(tpwrap(tmp_path / "without", script))
    assert results(tpwrap(tmp_path / "with", script, options=EVERY)) == expected
    killed = tpwrap(tmp_path / "killed", script, ["rank=1 step=7 phase=backward kill"], options=EVERY)
    assert results(killed) == expected
    assert len(killed.of(events.FailoverFinished)) == 1

"""`tpwrap --rehearse`: what is equal is run, what is not is named, and the script's files are left alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.e2e.conftest import EXAMPLE, SCRIPTS, assert_equal, processes_of, tpwrap, wait_for

RANKS = 3
FORGETFUL = [str(SCRIPTS / "forgetful.py")]
ONLY = ("--rehearse=only",)


def rehearsed(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("torchpass: rehearsal: ")]


def test_what_is_equal_is_run(tmp_path: Path, undisturbed: Any) -> None:
    run = tpwrap(tmp_path, EXAMPLE["gpt"], options=("--rehearse",))
    assert_equal(run, undisturbed("gpt", EXAMPLE["gpt"]))
    lines = rehearsed(run.output)
    assert lines[-1].startswith("torchpass: rehearsal: equal to the bit: 4 ranks, 6 updates, one failure healed")
    for rank in range(4):
        written = (run.results / f"rank{rank}.jsonl").read_text().splitlines()
        assert len(written) == 12, "the rehearsal has written to the script's files"


def test_a_counter_that_nobody_registers_is_found(tmp_path: Path) -> None:
    run = tpwrap(tmp_path, FORGETFUL, nodes=RANKS, options=("--rehearse",))
    assert run.code == 70
    differs, what_to_do, left = rehearsed(run.output)[-3:]
    assert differs.startswith("torchpass: rehearsal: NOT equal: step 4, rank 1: loss: 0.")
    assert "tp.register(name, get, set)" in what_to_do
    assert Path(left.rpartition(": ")[2]).is_dir()
    assert not run.run_dir.exists(), "the real run was started"
    assert not run.results.exists()


def test_nothing_else_is_run_with_only(tmp_path: Path) -> None:
    run = tpwrap(tmp_path, [*FORGETFUL, "--register"], nodes=RANKS, options=ONLY)
    assert run.code == 0, run.output
    assert "equal to the bit: 3 ranks, 6 updates" in run.output
    assert "is over" not in run.output
    assert not run.run_dir.exists()
    assert not run.results.exists(), "the rehearsal has written to the script's files"


def test_more_updates_reach_the_second_pass(tmp_path: Path) -> None:
    script = [*FORGETFUL, "--register"]
    run = tpwrap(tmp_path, script, nodes=2, options=(*ONLY, "--rehearse-steps", "9"))
    assert run.code == 0, run.output
    assert "2 ranks, 9 updates" in run.output


def test_a_script_that_fails_by_itself_is_told_from_one_that_cannot_be_healed(tmp_path: Path) -> None:
    run = tpwrap(tmp_path, [str(SCRIPTS / "bug.py"), "--exit", "7"], nodes=2, options=("--rehearse",))
    assert run.code == 7
    assert "the script fails without any failure of ours" in run.output
    assert not run.run_dir.exists()


def test_interrupt(tmp_path: Path) -> None:
    """Ctrl-C in a rehearsal ends everything below it."""
    seen: list[int] = []

    def interrupt(run_dir: Path) -> None:
        log = tmp_path / "output.txt"
        wait_for(lambda: "6 updates, undisturbed" in log.read_text())
        wait_for(lambda: len(processes_of(run_dir)) > 4)
        launcher = next(
            pid for pid in processes_of(run_dir) if b"--rehearse=only" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        seen.append(launcher)
        os.kill(launcher, signal.SIGINT)

    run = tpwrap(tmp_path, EXAMPLE["gpt"], nodes=2, options=ONLY, during=interrupt)
    assert seen
    assert run.code == 130
    assert processes_of(run.run_dir) == {}

"""When healing ends: out of spares, the user's own bug, spares that die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import EXAMPLE, SCRIPTS, assert_equal, processes_of, tpwrap, wait_for
from tpwrap.core import events


def launcher_of(run_dir: Path) -> int:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return next(e.pid for _, e in map(events.from_line, lines) if isinstance(e, events.JobStarted))


def test_out_of_spares_with_a_healthy_slot(tmp_path: Path, undisturbed) -> None:
    """The only spare is spent on a node; a process that dies later is healed where it was."""
    faults = ["node=1 step=3 phase=backward kill", "rank=2 step=6 phase=backward kill"]
    run = tpwrap(tmp_path, EXAMPLE["gpt"], faults, spares=1)
    assert_equal(run, undisturbed("gpt", EXAMPLE["gpt"]), {1, 2})


def test_out_of_spares_and_slots(tmp_path: Path) -> None:
    run = tpwrap(tmp_path, EXAMPLE["gpt"], ["node=1 step=3 phase=backward kill"])
    assert run.code == 75
    last = run.output.strip().splitlines()[-1]
    assert "node 1" in last
    assert "spare" in last
    assert processes_of(run.run_dir) == {}


def test_a_bug_on_one_rank_is_not_healed_for_ever(tmp_path: Path) -> None:
    run = tpwrap(tmp_path, [str(SCRIPTS / "bug.py"), "--rank", "1"], nodes=3, spares=1)
    assert run.code == 1
    assert "ZeroDivisionError: the user's own bug" in run.output
    assert run.output.count("Traceback") == 1
    assert processes_of(run.run_dir) == {}


def test_a_bug_on_all_ranks_ends_the_job_at_once(tmp_path: Path) -> None:
    run = tpwrap(tmp_path, [str(SCRIPTS / "bug.py")], nodes=3, spares=1)
    assert run.code == 1
    assert run.output.count("Traceback") == 1


def test_the_scripts_own_exit_code_is_passed_on(tmp_path: Path) -> None:
    run = tpwrap(tmp_path, [str(SCRIPTS / "bug.py"), "--exit", "7"], nodes=2)
    assert run.code == 7


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "allreduce at step 3 (collective 0 of group 0, stuck.py:36)"),
        ("return", "allreduce at step 3 (collective 0 of group 0, stuck.py:36)"),
        ("no-group", "the set-up of a process group"),
        # It is a newcomer that leaves: it has not run the steps before its entry, and is counted right nevertheless.
        ("exit after a failover", "allreduce at step 3 (collective 0 of group 0, stuck.py:36)"),
    ],
    ids=["exit", "return", "no-group", "newcomer"],
)
def test_a_rank_that_leaves_early_ends_the_job_with_whoever_waits_for_it(how: str, words: str, tmp_path: Path) -> None:
    faults = ["rank=1 step=1 phase=backward kill"] if "failover" in how else []
    script = [str(SCRIPTS / "stuck.py"), how.split()[0]]
    run = tpwrap(tmp_path, script, faults, nodes=3, options=("--failure-timeout", "2"))
    assert run.code == 1, run.output
    assert len(run.of(events.FailoverFinished)) == len(faults)
    last = run.output.strip().splitlines()[-1]
    assert "rank 1 has finished the script, but ranks 0, 2 wait in " + words in last
    assert "script is at fault" in last
    assert processes_of(run.run_dir) == {}


def test_a_deadlock_is_told_and_goes_on(tmp_path: Path) -> None:
    def wait_and_interrupt(run_dir: Path) -> None:
        output = tmp_path / "output.txt"
        wait_for(lambda: output.read_text().count("no progress for") == 2)
        os.kill(wait_for(lambda: launcher_of(run_dir)), signal.SIGINT)

    script = [str(SCRIPTS / "stuck.py"), "groups"]
    run = tpwrap(tmp_path, script, nodes=3, options=("--failure-timeout", "2"), during=wait_and_interrupt)
    assert run.code == 130
    assert (
        "ranks 0, 2 wait in barrier at step 3 (collective 0 of group 0, stuck.py:30); "
        "rank 1 waits in barrier at step 3 (collective 0 of group 1, stuck.py:30)" in run.output
    )


@pytest.mark.parametrize("when", ["idle", "restoring"])
def test_a_spare_that_dies(when: str, tmp_path: Path, undisturbed) -> None:
    """Idle: fewer spares, nothing else happens. While restoring: the next spare takes over."""
    faults = ["node=1 step=5 phase=backward kill"]
    if when == "restoring":
        faults.append("node=4 phase=recovery:restore kill")

    def kill_spare(run_dir: Path) -> None:
        def spare() -> int | None:
            path = run_dir / "events.jsonl"
            if not path.exists():
                return None
            found = [e for _, e in map(events.from_line, path.read_text().splitlines())]
            return next((e.pid for e in found if isinstance(e, events.NodeJoined) and e.node == 4), None)

        os.killpg(wait_for(spare), signal.SIGKILL)

    during = kill_spare if when == "idle" else None
    run = tpwrap(tmp_path, EXAMPLE["gpt"], faults, spares=2, during=during)
    assert_equal(run, undisturbed("gpt", EXAMPLE["gpt"]), {1})
    if when == "idle":
        assert [e.node for e in run.of(events.SpareLost)] == [4]


def test_interrupt_ends_everything(tmp_path: Path) -> None:
    def interrupt(run_dir: Path) -> None:
        log = run_dir / "events.jsonl"
        wait_for(lambda: log.exists() and "worker_assigned" in log.read_text())
        os.kill(launcher_of(run_dir), signal.SIGINT)

    run = tpwrap(tmp_path, EXAMPLE["gpt"], during=interrupt)
    assert run.code == 130
    assert processes_of(run.run_dir) == {}


def test_a_failure_after_the_store_was_lost_ends_the_job_at_once(tmp_path: Path) -> None:
    def kill_store_then_rank(run_dir: Path) -> None:
        def told(kind: type[Any]) -> list[Any]:
            path = run_dir / "events.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            return [event for _, event in map(events.from_line, lines) if isinstance(event, kind)]

        wait_for((tmp_path / "results" / "rank1.jsonl").exists)
        [store] = [pid for pid, name in processes_of(run_dir).items() if name == "tp-store"]
        os.kill(store, signal.SIGKILL)
        wait_for(lambda: "store has ended" in (tmp_path / "output.txt").read_text())
        os.kill(told(events.WorkerAssigned)[1].pid, signal.SIGKILL)

    script = [*EXAMPLE["gpt"], "--steps", "3000"]
    run = tpwrap(tmp_path, script, nodes=2, spares=1, during=kill_store_then_rank)
    assert run.code == 70
    last = run.output.strip().splitlines()[-1]
    assert "killed by SIGKILL" in last
    assert "store has ended" in last
    assert processes_of(run.run_dir) == {}

"""A user's mistake ends with a clear report, or training goes on and says what is wrong; nothing hangs.

Some mistakes cannot be told from intent (another learning rate on one rank): these end at the first comparison of
replicas, which is made after a failure, or every so many updates with --check-every.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import SCRIPTS, Run, processes_of, tpwrap, wait_for

KILL = "rank=1 step=3 phase=backward kill"


def run_kind(kind: str, directory: Path, *faults: str, timeout: int = 2, options: tuple[str, ...] = ()) -> Run:
    script = [str(SCRIPTS / "mistakes.py"), "--kind", kind]
    return tpwrap(directory, script, faults, nodes=3, spares=1, options=("--failure-timeout", str(timeout), *options))


def assert_ends(run: Run, code: int, *words: str) -> None:
    assert run.code == code, run.output[-6000:]
    last = run.output.strip().splitlines()[-1]
    for word in words:
        assert word in last, last
    assert wait_for(lambda: not processes_of(run.run_dir), 5)


def test_a_step_that_is_never_the_same_keeps_replicas_equal_over_a_failure(tmp_path: Path) -> None:
    """What a newcomer computes otherwise does not matter: it is served what all had agreed on."""
    run = run_kind("noisy-loss", tmp_path, KILL)
    assert run.code == 0, run.output[-6000:]
    assert len({run.final(rank)["weights"] for rank in range(3)}) == 1


@pytest.mark.parametrize(
    ("kind", "where"),
    [("nudged", "model/module.head.bias"), ("other-lr", "model/module.first.bias"), ("other-optimizer", "")],
)
def test_replicas_that_differ_are_found_after_a_failure(kind: str, where: str, tmp_path: Path) -> None:
    assert_ends(run_kind(kind, tmp_path, KILL), 70, "rank 2", where)


def test_replicas_that_differ_are_found_without_a_failure_if_asked_for(tmp_path: Path) -> None:
    run = run_kind("nudged", tmp_path, options=("--check-every", "1"))
    assert_ends(run, 70, "rank 2 (node 2) differs from ranks 0, 1 after update")


def test_a_layer_of_another_size_that_ddp_finds(tmp_path: Path) -> None:
    assert_ends(run_kind("other-layer-ddp", tmp_path), 1, "params[2]", "the script is at fault")


def test_a_layer_of_another_size_without_ddp(tmp_path: Path) -> None:
    """Gloo ends the process of whoever is sent too much, again and again: not the one that differs."""
    run = run_kind("other-layer", tmp_path)
    assert_ends(run, 75, "failed 3 times at the same step", "killed by SIGABRT")
    assert "Is there a distributed collective mismatch in your code?" in run.output


def test_layers_in_another_order_are_told_as_another_shard(tmp_path: Path) -> None:
    run = run_kind("other-order", tmp_path)
    assert run.code == 0, run.output[-6000:]
    assert "2 shards with 1 to 2 replicas: ranks 0 1 | 2" in run.output
    assert "rank 2 holds a shard that no other rank has" in run.output


@pytest.mark.parametrize(
    ("kind", "faults", "words"),
    [
        ("skips", (KILL,), "rank 2 has finished the script, but ranks 0, 1 wait in allreduce at step 7"),
        ("leaves", (), "rank 2 has finished the script, but ranks 0, 1 wait in allreduce at step 7"),
        ("evaluates", (), "ranks 0, 1 have finished the script, but rank 2 waits in barrier at step 8"),
    ],
)
def test_ranks_that_wait_for_ever_end_the_job(
    kind: str, faults: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    assert_ends(run_kind(kind, tmp_path, *faults), 1, words, "script is at fault")


def test_a_collective_that_only_one_rank_issues(tmp_path: Path) -> None:
    """It meets another one of the others, and gloo ends a process. Whether its newcomer gets past that place depends on
    where it died: it may go on only with equal replicas."""
    run = run_kind("one-more", tmp_path)
    assert "Is there a distributed collective mismatch in your code?" in run.output
    if run.code == 0:
        assert len({run.final(rank)["weights"] for rank in range(3)}) == 1
    else:
        assert "at the same step" in run.output.strip().splitlines()[-1]


WARNING = "warning: rank 2 never came to an update"


def test_a_rank_that_never_updates_is_not_waited_for(tmp_path: Path) -> None:
    run = run_kind("evaluator", tmp_path, timeout=1)
    assert run.code == 0, run.output[-6000:]
    assert WARNING in run.output


def test_a_failure_beside_a_rank_that_never_updates(tmp_path: Path) -> None:
    run = run_kind("evaluator", tmp_path, KILL, timeout=1)
    assert WARNING in run.output
    assert_ends(run, 70, "rank 1", "cannot be healed: rank 2 never came to an update")

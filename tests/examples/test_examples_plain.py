"""The examples under plain torchrun: they train, log what is promised, and repeat themselves bit for bit.

That they do so is the ground on which the equality tests under `tpwrap` stand.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
WORLD = 2
STEPS = 6
SMALL = {
    "digits": ["--epochs", "3", "--steps-per-epoch", "2", "--batch-size", "4", "--width", "4"],
    "gpt": ["--steps", "6", "--layers", "1", "--width", "16", "--heads", "2", "--context", "16"],
}


def train(example: str, out: Path, *options: str) -> str:
    """Run an example at its small size on two ranks; what it printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command = [*torchrun, str(EXAMPLES / f"{example}.py"), *SMALL[example], "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def lines(out: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"rank{rank}.jsonl").read_text().splitlines()]


def final(out: Path, rank: int) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((out / f"final{rank}.json").read_text())
    return value


@pytest.fixture(scope="module", params=sorted(SMALL))
def example(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outcome(example: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where one run of the example left its files, and what it printed."""
    out = tmp_path_factory.mktemp(example)
    return out, train(example, out)


def test_logs_every_step_once(outcome: tuple[Path, str]) -> None:
    out, _ = outcome
    for rank in range(WORLD):
        log = lines(out, rank)
        assert [line["step"] for line in log] == list(range(1, STEPS + 1))
        for line in log:
            assert set(line) == {"step", "loss", "samples", "lr"}
            assert 0 < float.fromhex(line["loss"]) < 10
            assert float.fromhex(line["lr"]) > 0


def test_no_two_steps_or_ranks_train_on_the_same_samples(outcome: tuple[Path, str]) -> None:
    out, _ = outcome
    samples = [line["samples"] for rank in range(WORLD) for line in lines(out, rank)]
    assert len(set(samples)) == WORLD * STEPS


def test_ranks_end_with_the_same_weights(outcome: tuple[Path, str]) -> None:
    out, _ = outcome
    first, second = final(out, 0), final(out, 1)
    assert first["weights"] == second["weights"]
    assert first["optimizer"] == second["optimizer"]
    assert first["pid"] != second["pid"]
    assert first["objects"] == second["objects"] == "ok"


def test_rank_0_prints_the_summary(outcome: tuple[Path, str]) -> None:
    out, printed = outcome
    assert printed.count("done: 6 steps") == 1
    assert final(out, 0)["weights"][:16] in printed


def test_a_second_run_is_identical(example: str, outcome: tuple[Path, str], tmp_path: Path) -> None:
    out, printed = outcome
    assert train(example, tmp_path) == printed
    for rank in range(WORLD):
        assert (tmp_path / f"rank{rank}.jsonl").read_bytes() == (out / f"rank{rank}.jsonl").read_bytes()
        mine, theirs = final(tmp_path, rank), final(out, rank)
        assert (mine["weights"], mine["optimizer"]) == (theirs["weights"], theirs["optimizer"])


def test_only_digits_keeps_a_checkpoint_an_epoch(example: str, outcome: tuple[Path, str]) -> None:
    out, _ = outcome
    kept = sorted(out.glob("checkpoint*"))
    if example != "digits":
        assert not kept
        return
    assert [path.name for path in kept] == ["checkpoint0.pt", "checkpoint1.pt", "checkpoint2.pt"]
    last = torch.load(kept[-1])
    assert last["epoch"] == 2
    assert len(last["history"]) == 3
    assert last["scheduler"]["last_epoch"] == STEPS

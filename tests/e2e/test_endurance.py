"""Many recoveries in one process; many random failures."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.conftest import EXAMPLE, RANKS, SCRIPTS, assert_equal, tpwrap
from tpwrap.core import events

RECOVERIES = 50


def test_fifty_recoveries_leave_threads_descriptors_and_memory_flat(tmp_path: Path) -> None:
    """Rank 1 is killed once a step, from step 5 on; rank 0 survives all of it."""
    faults = [f"rank=1 step={5 + n} phase=backward kill" for n in range(RECOVERIES)]
    run = tpwrap(tmp_path, [str(SCRIPTS / "resources.py")], faults, nodes=2)
    assert run.code == 0, run.output[-3000:]
    assert run.of(events.JobEnded)[0].failovers == RECOVERIES
    early, late = run.final(0)["early"], run.final(0)["late"]
    assert late["threads"] <= early["threads"] + 2
    assert late["descriptors"] <= early["descriptors"] + 4
    assert late["kilobytes"] <= early["kilobytes"] * 1.1


PHASES = ("between", "forward", "backward", "optimizer", "commit", "collective:0")
KILLS = 200


def random_faults(seed: int, steps: int) -> tuple[list[str], int]:
    """A handful of kills in different steps, some of whole nodes, some in the recovery before; spares needed."""
    dice = random.Random(seed)
    faults, spares, hosts = [], 0, list(range(RANKS))
    for step in sorted(dice.sample(range(1, steps - 1, 2), 4)):
        rank = dice.randrange(RANKS)
        phase = dice.choice(PHASES)
        if dice.random() < 0.3:
            faults.append(f"node={hosts[rank]} step={step} phase={phase} kill")
            hosts[rank] = RANKS + spares
            spares += 1
        else:
            faults.append(f"rank={rank} step={step} phase={phase} kill")
    if dice.random() < 0.5:
        stage = dice.choice(("release", "rebuild", "verify", "resume", "restore"))
        faults.append(f"rank={dice.randrange(RANKS)} phase=recovery:{stage} kill")
    return faults, spares


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(KILLS // 4))
def test_random_kills(seed: int, tmp_path: Path, undisturbed) -> None:
    example = "gpt" if seed % 2 else "digits"
    faults, spares = random_faults(seed, 12 if example == "gpt" else 24)
    run = tpwrap(tmp_path, EXAMPLE[example], faults, spares=spares + 2)
    assert_equal(run, undisturbed(example, EXAMPLE[example]), set(range(RANKS)))

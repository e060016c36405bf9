"""The table, row by row: killed, and equal to the bit to the run that lost nothing.

The rows beyond the ordinary ones are for `make soak`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Run, assert_equal
from tests.parallel import facts, pairwise, table
from tests.parallel.conftest import disturbed, skip_what_is_not_here
from tpwrap.core import events
from tpwrap.report import compare

Oracle = Callable[[pairwise.Row], Run]


def named(cases: list[table.Case]) -> list[object]:
    return [pytest.param(case, id=table.slug(case.row)) for case in cases]


def check(case: table.Case, directory: Path, oracle: Oracle) -> None:
    skip_what_is_not_here(case.configuration)
    quiet = oracle(case.configuration)
    updates = compare.read(quiet.results).last_step()
    run = disturbed(directory, case.configuration, case.faults(updates))
    victims = set(case.victims)
    assert len(run.of(events.FaultInjected)) == len(victims), run.output[-6000:]
    assert_equal(run, quiet, victims, case.kind.ranks)
    for rank in victims:
        assert run.final(rank)["pid"] != run.first_pid(rank)
    failovers = run.of(events.JobEnded)[0].failovers
    assert failovers == 1 or (failovers == 2 and len(victims) == 2)


@pytest.mark.parametrize("case", named(table.cases()[: len(table.ORDINARY)]))
def test_a_row(case: table.Case, tmp_path: Path, oracle: Oracle) -> None:
    check(case, tmp_path, oracle)


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", named(table.cases()[len(table.ORDINARY) :]))
def test_another_row(case: table.Case, tmp_path: Path, oracle: Oracle) -> None:
    check(case, tmp_path, oracle)


@pytest.mark.parametrize("case", named([table.Case(0, row) for row in table.PLAIN]))
def test_tpwrap_changes_nothing(case: table.Case, oracle: Oracle, plain: Callable[[pairwise.Row], Path]) -> None:
    assert compare.compare(plain(case.configuration), oracle(case.configuration).results) is None


ENDS = {
    "fsdp2": (75, "rank 2 was lost after update 3, and no other rank holds this shard"),
    "zero": (75, "rank 2 was lost after update 3, and no other rank holds this shard"),
    "fsdp1_hybrid": (70, "FullyShardedDataParallel keeps its parameters in flat pieces"),
    "ddp_powersgd": (70, "hook"),
    "held_before": (70, "update"),
}
NOT_YET = {"ddp_powersgd", "held_before"}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.xfail(strict=True, reason="goes on wrongly") if kind in NOT_YET else ())
        for kind in facts.UNHEALED
    ],
)
def test_what_cannot_be_healed_is_said(kind: str, tmp_path: Path, oracle: Oracle) -> None:
    configuration = table.simple(kind)
    assert oracle(configuration).code == 0
    run = disturbed(tmp_path, configuration, ["rank=2 step=3 phase=collective:0 kill"])
    code, words = ENDS[kind]
    assert run.code == code, run.output[-3000:]
    assert words in run.output.splitlines()[-1]

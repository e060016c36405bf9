"""When one item of the state is left out of what a newcomer gets, the comparison with the undisturbed run sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Run, assert_equal
from tests.parallel import left_out, pairwise, table
from tests.parallel.conftest import disturbed, skip_what_is_not_here
from tpwrap.core import events
from tpwrap.report import compare

VICTIM = 0
"""because DDP gives its buffers to all"""

MUCH = table.simple("ddp", precision="scaler", accumulation="2", scheduler="sequential", extra="batchnorm")
AVERAGED = table.simple("ddp", extra="ema")
WORKERS = table.simple("ddp", loader="workers")
SHUFFLED = table.simple("ddp", loader="map")
STATEFUL = table.simple("ddp", loader="stateful")
SHARDED = table.simple("hsdp", optimizer="adamw_foreach")

CONFIGURATIONS = [MUCH, AVERAGED, WORKERS, SHUFFLED, STATEFUL, SHARDED]
IN = {"average": [AVERAGED], "worker_seeds": [WORKERS, SHUFFLED]}
"""where an item is used; the others: in MUCH"""
ALSO = [(SHARDED, "parameters"), (SHARDED, "optimizer_state"), (STATEFUL, "data_position"), (STATEFUL, "sampler_epoch")]

CASES = [
    *((configuration, item) for item in left_out.ITEMS if item != "nothing" for configuration in IN.get(item, [MUCH])),
    *ALSO,
]

Oracle = Callable[[pairwise.Row], Run]


def fault(configuration: pairwise.Row) -> str:
    """In the middle of the second epoch, and so of everything. A scaler skips two of the ten updates."""
    step = 6 if configuration["precision"] == "scaler" else 8
    return f"rank={VICTIM} step={step} phase=backward kill"


def run_without(
    item: str, configuration: pairwise.Row, directory: Path, monkeypatch: pytest.MonkeyPatch, oracle: Oracle
) -> tuple[Run, Run]:
    """(the run with a failure and without the item, the undisturbed run)."""
    skip_what_is_not_here(configuration)
    quiet = oracle(configuration)
    monkeypatch.setenv("TPWRAP_TESTS_LEFT_OUT", item)
    run = disturbed(directory, configuration, [fault(configuration)])
    assert len(run.of(events.FaultInjected)) == 1
    return run, quiet


@pytest.mark.soak  # rows of the table show the same
@pytest.mark.parametrize("configuration", [pytest.param(c, id=table.slug(c)) for c in CONFIGURATIONS])
def test_with_nothing_left_out_they_are_equal(
    configuration: pairwise.Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle: Oracle
) -> None:
    run, quiet = run_without("nothing", configuration, tmp_path, monkeypatch, oracle)
    assert_equal(run, quiet, {VICTIM})


@pytest.mark.parametrize(
    ("configuration", "item"), [pytest.param(c, item, id=f"{item}-{table.slug(c)}") for c, item in CASES]
)
def test_an_item_that_is_left_out_is_seen(
    configuration: pairwise.Row, item: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle: Oracle
) -> None:
    run, quiet = run_without(item, configuration, tmp_path, monkeypatch, oracle)
    assert run.code != 0 or differs(quiet, run)


def differs(quiet: Run, run: Run) -> bool:
    try:
        return compare.compare(quiet.results, run.results) is not None
    except compare.ResultError:
        return True


def test_every_item_is_left_out_once() -> None:
    assert {item for _, item in CASES} == set(left_out.ITEMS) - {"nothing"}

"""Trainer libraries with unchanged user code: with failures, each example leaves what it leaves when it runs alone.

One run meets four failures: at the first step, in the middle of an epoch, in an evaluation, at the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adapters.conftest import EXAMPLE, EXAMPLES, Example, difference, left, under_tpwrap
from tpwrap.core import events

pytestmark = pytest.mark.timeout(600)
Oracle = Callable[[Example], Path]


def test_no_example_knows_of_tpwrap() -> None:
    assert [file.name for file in EXAMPLES.glob("*.py") if "import tpwrap" in file.read_text()] == []


@pytest.mark.parametrize("example", EXAMPLE.values(), ids=list(EXAMPLE))
def test_four_kills(example: Example, tmp_path: Path, oracle: Oracle) -> None:
    pytest.importorskip(example.needs, reason=f"{example.needs} is not installed (examples/frameworks/README.md)")
    run = under_tpwrap(tmp_path, example, example.kills)
    assert run.code == 0, run.output[-6000:]
    assert len(run.of(events.FaultInjected)) == len(example.kills), run.output[-3000:]
    assert len(run.of(events.FailoverFinished)) == len(example.kills), run.output[-3000:]
    assert difference(left(oracle(example)), left(tmp_path)) is None

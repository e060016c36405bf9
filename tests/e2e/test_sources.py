"""A survivor that dies, or freezes, while it gives its state to a newcomer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import EXAMPLE, assert_equal, tpwrap
from tpwrap.core import events


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_source_fails_in_the_middle_of_what_it_sends(action: str, tmp_path: Path, undisturbed) -> None:
    """Rank 0 is the first that the newcomer asks; ranks 2 and 3 hold the same."""
    faults = ["rank=1 step=5 phase=backward kill", f"rank=0 phase=recovery:restore {action}"]
    run = tpwrap(tmp_path, EXAMPLE["gpt"], faults, options=("--failure-timeout", "3"))
    assert_equal(run, undisturbed("gpt", EXAMPLE["gpt"]), {0, 1})
    assert [event.fault for event in run.of(events.FaultInjected)] == faults

from __future__ import annotations

import pytest

from tpwrap.slurm.ending import decide


@pytest.mark.parametrize(
    ("finished", "may_requeue", "action"),
    [(True, True, "cancel"), (True, False, "cancel"), (False, True, "requeue"), (False, False, "cancel")],
)
def test_decide(finished: bool, may_requeue: bool, action: str) -> None:
    chosen, reason = decide(finished, may_requeue)
    assert chosen == action
    assert "batch script" in reason

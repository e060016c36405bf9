from __future__ import annotations

import pytest

from tpwrap.slurm.ending import decide


@pytest.mark.parametrize(
    ("exit_code", "may_requeue", "action"),
    [
        (0, True, "cancel"),
        (0, False, "cancel"),
        (76, True, "requeue"),
        (75, True, "requeue"),
        (75, False, "cancel"),
        (1, True, "cancel"),  # the script's own error would come again
        (143, True, "cancel"),  # somebody wanted it to end
    ],
)
def test_a_job_without_its_batch_script(exit_code: int, may_requeue: bool, action: str) -> None:
    chosen, reason = decide(exit_code, running=True, may_requeue=may_requeue, batch_host_answers=False)
    assert chosen == action
    assert "batch script" in reason


def test_nobody_ends_a_job_that_is_not_theirs_to_end() -> None:
    assert decide(76, running=False, may_requeue=True, batch_host_answers=False)[0] == "nothing"
    assert decide(76, running=True, may_requeue=True, batch_host_answers=True)[0] == "nothing"

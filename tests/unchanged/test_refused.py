"""Scripts that cannot be healed, or not to the bit: `--strict` refuses them and says where and what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unchanged.catalogue import OUTPUT, REFUSED, Script
from tests.unchanged.conftest import under_tpwrap
from tpwrap.core import events

REASONS = {
    "lbfgs": ("lbfgs.py:28", "call backward() before optimizer.step()"),
    "fsdp": ("is sharded (FSDP2)", "add the two lines"),
    "large_outputs": ("`large_outputs.py:step/outputs` (2.1 MB)", "compute what you need of it before backward()"),
    "local_norm": ("local_norm.py:27", "read it before backward(), or after optimizer.step()"),
    "gradients_after_step": ("gradients_after_step.py:27", "read it before optimizer.step()"),
    "large_numpy": ("8.4 MB are taken out of a tensor (large_numpy.py:29)", "take less out"),
    "no_ddp": ("holds other weights than rank", "wrap the model in DistributedDataParallel"),
}
"""script -> where, and what to do"""
STEPS = {"no_ddp": 4000}
"""updates before it ends: where only the coordinator can tell, ranks do not wait for it"""


@pytest.mark.parametrize("name", REASONS)
def test_strict_refuses(name: str, tmp_path: Path) -> None:
    script = Script(name, 8, 8, command=(sys.executable, str(REFUSED / f"{name}.py"), "--output-dir", OUTPUT))
    run = under_tpwrap(tmp_path, script, options=("--strict",))
    assert run.code == 2, run.output[-4000:]
    last = run.output.strip().splitlines()[-1]
    assert last.startswith("torchpass: exit code 2: --strict: ")
    for part in REASONS[name]:
        assert part in last
    assert run.of(events.JobEnded)[0].steps <= STEPS.get(name, 3)
    assert not run.results.exists()  # it never came to its end

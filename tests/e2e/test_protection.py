"""What is said at the start about a script as it is, and --strict."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import SCRIPTS, Run, processes_of, tpwrap
from tpwrap.core import events

PLAIN = [str(SCRIPTS / "plain.py")]
LATE = [*PLAIN, "--late"]
RECOGNISED = "plain.py as it is: 1 loader (48 samples), 1 model (DDP, 5 parameters), AdamW"


def said(run: Run) -> list[str]:
    """The lines that rank 0's block, and what came later, consist of."""
    lines = [line for event in run.of(events.Protection) for line in event.lines]
    shown = [line.removeprefix("torchpass: ") for line in run.output.splitlines()]
    assert [line for line in shown if line in lines] == lines
    return lines


def test_what_is_protected_is_said_once(tmp_path: Path) -> None:
    run = tpwrap(tmp_path, PLAIN, nodes=2, options=("--strict",))
    assert run.code == 0, run.output
    first, second, *more = said(run)
    assert first == RECOGNISED
    assert second.startswith("protected: weights, optimizer, random state, place in the data, the script's variables")
    assert not any("protected" in line for line in more)
    assert len({*more}) == len(more)


def test_what_is_not_protected_is_said_and_runs(tmp_path: Path) -> None:
    run = tpwrap(tmp_path, LATE, nodes=2)
    assert run.code == 0, run.output
    lines = said(run)
    assert lines[0] == RECOGNISED
    (line,) = [line for line in lines if line.startswith("NOT protected: ")]
    assert "plain.py:32" in line
    assert "read it before optimizer.step()" in line


def test_strict_ends_the_job_with_what_to_do(tmp_path: Path) -> None:
    run = tpwrap(tmp_path, LATE, nodes=2, options=("--strict",))
    assert run.code == 2, run.output
    last = run.output.strip().splitlines()[-1]
    assert last.startswith("torchpass: exit code 2: --strict: rank ")
    assert "plain.py:32" in last
    assert "read it before optimizer.step()" in last
    assert "is over" not in run.output
    assert max(event.steps for event in run.of(events.JobEnded)) <= 3
    assert processes_of(run.run_dir) == {}

"""Scripts that know nothing of tpwrap: with a failure, each leaves what it leaves when it runs alone.

The oracle is the script under plain Python, one process a rank: so this also shows that tpwrap changes nothing while
nothing fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unchanged.catalogue import DIRECTORY, SCRIPTS, Kill, Script, chosen, others
from tests.unchanged.conftest import assert_equal, under_tpwrap

KILLS = [
    pytest.param(
        script,
        chosen(number),
        marks=[pytest.mark.soak] if number % 2 else [],
        id=f"{script.name}-{'-'.join(map(str, chosen(number)))}",
    )
    for number, script in enumerate(SCRIPTS)
]
MORE_KILLS = [
    pytest.param(script, kill, id=f"{script.name}-{'-'.join(map(str, kill))}")
    for number, script in enumerate(SCRIPTS)
    for kill in others(number)
]


UNDISTURBED = [
    pytest.param(script, marks=[pytest.mark.soak] if number % 5 else [], id=script.name)
    for number, script in enumerate(SCRIPTS)
]  # the runs with a kill show nearly the same


def test_no_script_knows_of_tpwrap() -> None:
    assert [file.name for file in DIRECTORY.rglob("*.py") if "tpwrap" in file.read_text()] == []


@pytest.mark.parametrize("script", UNDISTURBED)
def test_tpwrap_changes_nothing(script: Script, tmp_path: Path, oracle) -> None:
    """Nor is any of them refused."""
    needed(script)
    assert_equal(under_tpwrap(tmp_path, script, options=("--strict",)), oracle(script), script, set(), 0)


@pytest.mark.parametrize(("script", "kill"), KILLS)
def test_a_kill(script: Script, kill: Kill, tmp_path: Path, oracle) -> None:
    killed(script, kill, tmp_path, oracle)


@pytest.mark.parametrize("name", ["nanogpt", "epochs_meters"])
def test_one_failure_after_another(name: str, tmp_path: Path, oracle) -> None:
    """Rank 0 dies three times, rank 1 between: a newcomer's record goes on where it found it."""
    script = next(script for script in SCRIPTS if script.name == name)
    kills: tuple[Kill, ...] = (("first", 0, "rank"), ("boundary", 0, "rank"), ("middle", 1, "rank"), ("end", 0, "rank"))
    run = under_tpwrap(tmp_path, script, tuple(script.fault(kill) for kill in kills))
    assert_equal(run, oracle(script), script, {0, 1}, len(kills))


@pytest.mark.soak
@pytest.mark.parametrize(("script", "kill"), MORE_KILLS)
def test_every_other_kill(script: Script, kill: Kill, tmp_path: Path, oracle) -> None:
    killed(script, kill, tmp_path, oracle)


def killed(script: Script, kill: Kill, directory: Path, oracle) -> None:
    needed(script)
    run = under_tpwrap(directory, script, (script.fault(kill),))
    assert_equal(run, oracle(script), script, {kill[1]}, 1)


def needed(script: Script) -> None:
    """Skips where a module is missing that the script imports."""
    for module in script.needs:
        pytest.importorskip(module)

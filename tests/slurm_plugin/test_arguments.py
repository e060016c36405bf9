"""The arguments of the plugin's line in plugstack.conf."""

import subprocess
from pathlib import Path

import pytest

from tests.slurm_plugin.building import HERE, PLUGIN, build

UNDERSTOOD = [
    ("", "64 0 1 plugin -"),
    ("max_spares=4", "4 0 1 plugin -"),
    ("max_spares=0", "0 0 1 plugin -"),
    ("max_drain=3 helper=no", "64 3 0 plugin -"),
    ("helper=yes confirm=/opt/ask", "64 0 1 plugin /opt/ask"),
    ("enlarge=plugin", "64 0 1 plugin -"),
    ("enlarge=cli_filter", "64 0 1 cli_filter -"),
    ("enlarge=job_submit", "64 0 1 job_submit -"),
    ("max_spares=4 max_spares=5", "5 0 1 plugin -"),
]
FAULTY = [
    "max_spares=",
    "max_spares=-1",
    "max_spares=4x",
    "max_spares= 4",
    "max_spares=4294967296",
    "max_spares=99999999999999999999",
    "max_spares",
    "maxspares=4",
    "max_drain=two",
    "helper=maybe",
    "enlarge=no",
    "confirm=ask",
    "confirm=",
    "x" * 500,
    "",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments")
    return build(folder / "arguments", PLUGIN / "arguments.c", HERE / "arguments_table.c")


def read(program: Path, *arguments: str) -> tuple[str, str]:
    lines = subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout.splitlines()
    return lines[0], lines[1]


@pytest.mark.parametrize(("line", "expected"), UNDERSTOOD)
def test_understood(program: Path, line: str, expected: str) -> None:
    assert read(program, *line.split()) == (expected, "")


@pytest.mark.parametrize("argument", FAULTY)
def test_a_faulty_argument_costs_the_helper_and_is_named(program: Path, argument: str) -> None:
    """It may have been the site's limit on the helper; all else keeps what the other arguments say."""
    site, fault = read(program, "max_spares=4", argument, "max_drain=2")
    assert site == "4 2 0 plugin -"
    assert f"'{argument[:60]}' in plugstack.conf is not understood; write max_spares=N" in fault

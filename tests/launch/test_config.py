"""Where settings come from, which wins, and what is said when one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpwrap.core.config import Config, ConfigError, Source, merge
from tpwrap.launch.config import load, make_job


def test_defaults(tmp_path: Path) -> None:
    assert load({}, {}, tmp_path).config == Config()


def test_command_line_over_environment_over_file(tmp_path: Path) -> None:
    (tmp_path / "torchpass.toml").write_text("nodes = 2\nspares = 2\nfailure-timeout = 3\nwarm = false\n")
    environment = {"TORCHPASS_NODES": "3", "TORCHPASS_SPARES": "3", "OTHER": "x"}
    settings = load({"nodes": "4"}, environment, tmp_path)
    config = settings.config
    assert (config.nodes, config.spares, config.failure_timeout, config.warm) == (4, 3, 3.0, False)
    assert config.nproc_per_node == 1
    assert settings.origin["nodes"] == "--nodes (command line)"
    assert settings.origin["spares"] == "TORCHPASS_SPARES (environment)"
    assert settings.origin["failure_timeout"] == f"failure_timeout ({tmp_path}/torchpass.toml)"


def test_explicit_file(tmp_path: Path) -> None:
    (tmp_path / "torchpass.toml").write_text("nodes = 2\n")
    (tmp_path / "other.toml").write_text("nodes = 5\n")
    assert load({}, {}, tmp_path, str(tmp_path / "other.toml")).config.nodes == 5


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("0", False), ("false", False)],
)
def test_booleans_in_the_environment(text: str, value: bool, tmp_path: Path) -> None:
    assert load({}, {"TORCHPASS_WARM": text}, tmp_path).config.warm is value


def test_faults_in_the_environment(tmp_path: Path) -> None:
    text = "rank=0 step=1 phase=backward kill; rank=0 step=2 phase=forward exit"
    assert len(make_job(load({}, {"TORCHPASS_INJECT": text}, tmp_path)).faults) == 2


def test_faults_of_file_come_after_those_given_directly(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    file.write_text("# a comment\n\nrank=0 step=2 phase=forward exit\n")
    given = {"inject": ["rank=0 step=1 phase=backward kill"], "inject_file": str(file)}
    faults = make_job(load(given, {}, tmp_path)).faults
    assert [fault.step for fault in faults] == [1, 2]


@pytest.mark.parametrize(
    ("command_line", "environment", "file", "words"),
    [
        ({"nodes": "four"}, {}, "", ["--nodes (command line)", "'four'", "whole number", "for example 4"]),
        ({"nodes": "0"}, {}, "", ["--nodes (command line)", "at least 1"]),
        ({"run_dir": ""}, {}, "", ["--run-dir (command line) is ''", "a directory"]),
        ({}, {}, 'log_dir = "a\\u0000b"', ["log_dir (", "a directory"]),
        ({"nproc_per_node": "gpu"}, {}, "", ["--nproc-per-node (command line)", "'gpu'"]),
        ({}, {"TORCHPASS_SPARES": "-1"}, "", ["TORCHPASS_SPARES (environment)", "at least 0"]),
        ({}, {"TORCHPASS_SPARE": "1"}, "", ["TORCHPASS_SPARE (env", "did you mean TORCHPASS_SPARES"]),
        ({}, {}, "spares = '1'", ["spares (", "torchpass.toml)", "whole number"]),
        ({}, {}, "spares = true", ["spares (", "torchpass.toml)", "whole number"]),
        ({}, {}, "nodez = 1", ["nodez (", "torchpass.toml)", "did you mean nodes"]),
        ({}, {}, "colour = 1", ["colour (", "torchpass.toml)", "known are: nodes"]),
        ({}, {}, "nodes =", ["torchpass.toml", "not valid TOML"]),
        ({"unit": "rack"}, {}, "", ["--unit (command line)", "'rack'", "'node'", "'rank'"]),
        ({"failure_timeout": "0.01"}, {}, "", ["--failure-timeout (command line)", "0.2 to 3600"]),
        ({"inject": ["rank=1"]}, {}, "", ["--inject (command line)", "action is missing"]),
        ({"inject": ["rank=7 step=1 phase=forward kill"]}, {}, "", ["--inject (command line)", "rank=0"]),
        ({"inject_file": "/no/such"}, {}, "", ["--inject-file (command line)", "/no/such"]),
    ],
)
def test_errors_name_field_source_and_fix_in_one_line(
    command_line: dict[str, object],
    environment: dict[str, str],
    file: str,
    words: list[str],
    tmp_path: Path,
) -> None:
    if file:
        (tmp_path / "torchpass.toml").write_text(file + "\n")
    with pytest.raises(ConfigError) as error:
        make_job(load(command_line, environment, tmp_path))
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_a_wrong_value_that_is_overridden_harms_nobody() -> None:
    settings = merge([Source("a {field}", {"nodes": 2}), Source("b {field}", {"nodes": "nonsense"})])
    assert settings.config.nodes == 2

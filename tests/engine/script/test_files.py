"""Whose code a file holds."""

from __future__ import annotations

import importlib
import json
import os

import pytest
import torch

import tpwrap
from tpwrap.engine.script import files


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (__file__, True),
        ("train.py", True),
        ("/home/user/train.py", True),
        ("<stdin>", True),
        ("<string>", True),
        ("/home/user/site-packages.py", True),
        ("/home/user/my-site-packages/train.py", True),
        (tpwrap.__file__, False),
        (files.__file__, False),
        (torch.__file__, False),
        (json.__file__, False),
        (os.__file__, False),
        (importlib.__file__, False),
        ("<frozen importlib._bootstrap>", False),
        ("/usr/lib/python3/dist-packages/numpy/__init__.py", False),
        ("/opt/venv/lib/python3.12/site-packages/x.py", False),
    ],
)
def test_whose_code_it_is(name: str, own: bool) -> None:
    assert files.is_script_file(name) is own
    assert files.is_script_file(name) is own  # and as remembered


def test_a_directory_beside_ours_is_not_ours() -> None:
    beside = os.path.dirname(os.path.abspath(tpwrap.__file__)) + "_experiments/train.py"
    assert files.is_script_file(beside)


def test_a_followed_file_counts_as_the_scripts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_script_files", {})
    monkeypatch.setattr(files, "_followed", set())
    name, other = "/opt/venv/lib/python3.12/site-packages/trainer.py", "/opt/venv/lib/python3.12/site-packages/x.py"
    assert not files.is_script_file(name)
    files.follow(name)
    assert files.is_script_file(name)
    assert files.is_followed(name)
    assert not files.is_script_file(other)
    assert not files.is_followed(other)
    assert not files.is_followed(__file__)  # the script's own needs no following

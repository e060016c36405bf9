"""Whose code a file holds: the script's own, or a library's."""

from __future__ import annotations

import os

_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def is_script_file(name: str) -> bool:
    """Whether code in this file is the user's own, not a library's."""
    known = _script_files.get(name)
    if known is None:
        absolute = os.path.abspath(name)
        library = absolute.startswith((_STANDARD, _OURS)) or any(part in absolute for part in _PACKAGES)
        known = _script_files[name] = not library and not name.startswith("<frozen")
    return known


_script_files: dict[str, bool] = {}


def follow(file: str) -> None:
    """Code in this file of a library counts as the script's own: what it asks of files and clocks, and what its
    variables hold during a step."""
    _script_files[file] = True
    _followed.add(file)


def is_followed(file: str) -> bool:
    return file in _followed


_followed: set[str] = set()

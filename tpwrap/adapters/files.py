"""fsspec's local files, through which Lightning and others ask what is on the disk."""

from __future__ import annotations

from typing import Any

from tpwrap.adapters.places import Places


def apply(places: Places, module: Any) -> None:
    places.answered(module.LocalFileSystem, "exists", "isfile", "isdir", "ls", "listdir", "glob", "find")

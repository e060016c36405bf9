"""Accelerate.

* Its loaders hold the next batch in a generator while the script trains on one.
* Whether a checkpoint's folder is there already is a question about the past on a newcomer's way. Right after its entry
  it is there because the failed rank and the others have begun the same checkpoint.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from tpwrap.adapters.places import Places


def apply(places: Places, module: Any) -> None:
    if module.__name__ == "accelerate.data_loader":
        places.follow(module.__file__)
        return
    accelerator = module.Accelerator
    original = accelerator.save_state

    def save(self: Any, *args: Any, **kwargs: Any) -> str:
        if not (places.redoing and self.project_configuration.automatic_checkpoint_naming):
            return str(original(self, *args, **kwargs))
        folder = os.path.join(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
        module.os = _Before(folder)
        try:
            return str(original(self, *args, **kwargs))
        finally:
            module.os = os

    @functools.wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not places.boundary.outside:
            return original(self, *args, **kwargs)
        skipping = places.skipping
        path = places.cross(lambda: save(self, *args, **kwargs))
        if skipping:
            self.project_configuration.iteration += 1
        return Path(path)

    accelerator.save_state = save_state
    places.skipped(accelerator, "save_model")


class _Before:
    """The module `os`, as it was before a folder was made."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.path = _PathBefore(folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def listdir(self, path: str) -> list[str]:
        return [name for name in os.listdir(path) if os.path.join(path, name) != self._folder]


class _PathBefore:
    """`os.path`, the same."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(os.path, name)

    def exists(self, path: str) -> bool:
        return path != self._folder and os.path.exists(path)

"""Accelerate.

* Its loaders hold the next batch in a generator while the script trains on one.
* Whether there is room for a checkpoint's directory is a question about the past on a newcomer's way.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tpwrap.adapters.places import Places


def apply(places: Places, module: Any) -> None:
    if module.__name__ == "accelerate.data_loader":
        places.follow(module.__file__)
        return
    accelerator = module.Accelerator
    original = accelerator.save_state

    @functools.wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not places.boundary.outside:
            return original(self, *args, **kwargs)
        skipping = places.skipping
        path = places.cross(lambda: str(original(self, *args, **kwargs)))
        if skipping:
            self.project_configuration.iteration += 1
        return Path(path)

    accelerator.save_state = save_state
    places.skipped(accelerator, "save_model")

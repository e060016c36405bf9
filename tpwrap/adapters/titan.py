"""TorchTitan.

* Its container of optimizers is an optimizer, too, with the same parameters: the updates are those of the inner ones.
* Which checkpoint it loads first is a question about the past on a newcomer's way.
"""

from __future__ import annotations

import functools
from typing import Any

from tpwrap.adapters.places import Places


def apply(places: Places, module: Any) -> None:
    container = getattr(module, "OptimizersContainer", None)
    if container is not None and container.__module__ == module.__name__:
        _container(places, container)
    manager = getattr(module, "CheckpointManager", None)
    if manager is not None and manager.__module__ == module.__name__:
        places.answered(manager, "_find_load_step")


def _container(places: Places, container: Any) -> None:
    original = container._post_init

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        optimizers = places.regions.optimizers
        optimizers[:] = [one for one in optimizers if one is not self]
        vars(self).pop("step", None)
        return result

    container._post_init = post_init

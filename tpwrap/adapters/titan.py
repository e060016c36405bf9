"""TorchTitan: its container of optimizers is an optimizer, too, with the same parameters. The updates are the inner ones'."""

from __future__ import annotations

import functools
from typing import Any

from tpwrap.adapters.places import Places


def apply(places: Places, module: Any) -> None:
    container = getattr(module, "OptimizersContainer", None)
    if container is None or container.__module__ != module.__name__:
        return
    original = container._post_init

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        optimizers = places.regions.optimizers
        optimizers[:] = [one for one in optimizers if one is not self]
        vars(self).pop("step", None)
        return result

    container._post_init = post_init

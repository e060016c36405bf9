"""TorchTitan.

* Its trainer holds a step's losses in variables of its own.
* Its container of optimizers is an optimizer, too, with the same parameters: the updates are those of the inner ones.
* Which checkpoint it loads first, and which ones are to go, are questions about the past on a newcomer's way.
"""

from __future__ import annotations

import functools
from typing import Any

from tpwrap.adapters.places import Places


def apply(places: Places, module: Any) -> None:
    if module.__name__ == "torchtitan.tools.filesystem":
        places.answered(module, "exists", "isdir", "isfile", "listdir")
    elif module.__name__ in ("torchtitan.components.checkpoint", "torchtitan.train", "torchtitan.trainer"):
        places.follow(module.__file__)
    elif module.__name__ == "torchtitan.components.checkpointer.base":
        places.holds_nothing(module.ModelWrapper)  # a cache of state_dict()
    elif module.OptimizersContainer.__module__ == module.__name__:
        _container(places, module.OptimizersContainer)


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

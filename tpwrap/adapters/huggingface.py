"""Hugging Face's Trainer: what it asks the disk, and evaluations too large for the record."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tpwrap.adapters.places import Places


def apply(places: Places, module: Any) -> None:
    places.follow(module.__file__)
    if module.__name__.endswith("trainer_utils"):
        places.answered_everywhere(module, "sort_checkpoints")
    else:
        _evaluation(places, module.Trainer)


def _evaluation(places: Places, trainer: Any) -> None:
    """Predictions are recorded up to some size; the metrics that were computed from them always."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            if not places.boundary.outside:
                return output
            return output._replace(metrics=places.cross(lambda: output.metrics))

        return evaluation_loop

    trainer.evaluation_loop = wrap(trainer.evaluation_loop)

"""Gradient scalers of a script that uses the two lines: found by themselves.

A scaler's scale changes after the update, by whether a gradient was infinite. A rank that has come to the end of an
update had none, so that is what a newcomer is told.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

_made: list[weakref.ref[Any]] = []


def install() -> None:
    """Note every scaler that the script makes."""
    original = torch.amp.GradScaler.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _made.append(weakref.ref(self, _made.remove))

    torch.amp.GradScaler.__init__ = made  # type: ignore[method-assign]


def capture() -> list[dict[str, Any]]:
    """The state of each, in the order in which they were made."""
    return [scaler.state_dict() for scaler in _alive()]


def restore(states: list[dict[str, Any]]) -> None:
    """After an update: no gradient of it was infinite."""
    for scaler, state in zip(_alive(), states, strict=False):
        if state:
            scaler.load_state_dict(state)
        for of_optimizer in scaler._per_optimizer_states.values():
            for found in of_optimizer["found_inf_per_device"].values():
                found.zero_()


def put_back(states: list[dict[str, Any]]) -> None:
    """Before a step: nothing of it has been unscaled yet."""
    restore(states)
    for scaler in _alive():
        scaler._per_optimizer_states.clear()


def _alive() -> list[Any]:
    return [scaler for one in list(_made) if (scaler := one()) is not None]

"""Gradient scalers of a script that uses the two lines: found by themselves.

A scaler's scale changes after the update, by whether a gradient was infinite. A rank that has come to the end of an
update had none (or its optimizer skips such gradients by itself, and the replicas know), so that is what a newcomer is
told. Its own gradients, on the way there, mean nothing: whether an update comes is what the failed rank has known.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_made: list[weakref.ref[Any]] = []


def install(will_update: Callable[[], bool | None]) -> None:
    """Note every scaler that the script makes. will_update: of a newcomer on its way, whether the failed rank updated
    here; None: live, the gradients decide."""
    original = torch.amp.GradScaler.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _made.append(weakref.ref(self, _made.remove))

    torch.amp.GradScaler.__init__ = made  # type: ignore[method-assign]
    original_step = torch.amp.GradScaler._maybe_opt_step

    @functools.wraps(original_step)
    def maybe_step(self: Any, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        decided = will_update()
        if decided is not None:
            for found in state["found_inf_per_device"].values():
                found.fill_(0.0 if decided else 1.0)
        return original_step(self, optimizer, state, *args, **kwargs)

    torch.amp.GradScaler._maybe_opt_step = maybe_step  # type: ignore[method-assign,assignment]


def capture() -> list[dict[str, Any]]:
    """The state of each, in the order in which they were made."""
    return [scaler.state_dict() for scaler in _alive()]


def restore(states: list[dict[str, Any]], skipped: bool = False) -> None:
    """After an update. skipped: its gradients were infinite."""
    for scaler, state in zip(_alive(), states, strict=False):
        scaler.load_state_dict(state)
        for of_optimizer in scaler._per_optimizer_states.values():
            for found in of_optimizer["found_inf_per_device"].values():
                found.fill_(float(skipped))


def put_back(states: list[dict[str, Any]]) -> None:
    """Before a step: nothing of it has been unscaled yet."""
    restore(states)
    for scaler in _alive():
        scaler._per_optimizer_states.clear()


def _alive() -> list[Any]:
    """Disabled ones have no state."""
    return [scaler for one in list(_made) if (scaler := one()) is not None and scaler.is_enabled()]

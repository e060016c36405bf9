"""DTensors, of which a rank holds a piece. Told by their attribute: their module takes long to import."""

from __future__ import annotations

from typing import Any

import torch


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, as a plain tensor without history."""
    # Not DTensor.to_local(): the piece itself, also inside autograd, and without waiting for anything.
    piece: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return piece.detach()

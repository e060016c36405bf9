"""Random number generators of this process: Python, NumPy, torch on the CPU and on its accelerator."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of every global generator, as data that `encoding` takes (about 10 kB)."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, np.array(words, dtype=np.uint32), gauss],
        "numpy": [kind, np.array(keys, dtype=np.uint32), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set every generator to what `capture` saw."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(w) for w in words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two captures are equal, bit for bit."""
    return (
        bool(np.array_equal(a["python"][1], b["python"][1]))
        and a["python"][2] == b["python"][2]
        and bool(np.array_equal(a["numpy"][1], b["numpy"][1]))
        and a["numpy"][2:] == b["numpy"][2:]
        and bool(torch.equal(a["torch"], b["torch"]))
        and ("cuda" in a) == ("cuda" in b)
        and ("cuda" not in a or bool(torch.equal(a["cuda"], b["cuda"])))
    )

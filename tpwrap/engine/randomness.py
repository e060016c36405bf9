"""Random number generators of this process: Python, NumPy, torch on the CPU and on its accelerator.

States are kept as bytes: they are taken twice a step, and bytes cost least to copy, compare, encode and send.
"""

from __future__ import annotations

import random
from array import array
from typing import Any, TypeAlias

import numpy as np
import torch

State: TypeAlias = dict[str, Any]


def capture() -> State:
    """The state of every global generator, as data that `encoding` takes (about 10 kB)."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: State = {
        "python": array("I", words).tobytes(),
        "python_rest": [version, gauss],
        "numpy": keys.tobytes(),  # type: ignore[union-attr]
        "numpy_rest": [kind, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def restore(state: State) -> None:
    """Set every generator to what `capture` saw."""
    version, gauss = state["python_rest"]
    random.setstate((version, tuple(array("I", state["python"])), gauss))
    kind, position, has_gauss, cached = state["numpy_rest"]
    np.random.set_state((kind, np.frombuffer(state["numpy"], dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if "cuda" in state:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))

"""A sidecar's memory comes back from its bytes as it was, every field of it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tpwrap.engine import randomness
from tpwrap.engine.script.memory import Memory
from tpwrap.engine.script.passes import Moment, PassState
from tpwrap.engine.script.tape import End


def comparable(value: Any) -> Any:
    """Tensors and arrays by their bytes."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", value.dtype, value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: comparable(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value), [comparable(v) for v in value])
    return value


def full() -> Memory:
    random.gauss(0, 1)
    np.random.standard_normal()
    here = randomness.capture()
    random.random()
    there = randomness.capture()
    own = {
        "loader.generator": torch.Generator().manual_seed(3).get_state(),
        "loader.dataset.python": random.Random(3).getstate(),
        "loader.dataset.new": np.random.default_rng(3).bit_generator.state,
        "loader.dataset.old": list(np.random.RandomState(3).get_state(legacy=True)),
    }
    return Memory(
        step=7,
        backwards=9,
        random=here,
        tape=End(2, b"open", 33),
        losses=[torch.tensor(1.5), torch.tensor([2.5])],
        buffers=[{"bn.running_mean": torch.arange(3.0)}, {}],
        loose={"main.total": torch.tensor(4, dtype=torch.int64)},
        aliases={"main.also": "main.total"},
        scalars={"main.count": 3, "main.name": "x", "main.rate": 1e-3},
        slow=["main.average"],
        large={"main.cache": 1 << 30},
        passes={
            0: PassState(Moment(here, own), Moment(there, own)),
            4: PassState(Moment(there, {}), None),
        },
        own=[own, {}],
    )


def test_every_field_comes_back() -> None:
    memory = full()
    assert all(memory), "a field that is empty here would not be missed"
    found = Memory.decode(memory.encode())
    assert type(found) is Memory
    for name in Memory._fields:
        assert comparable(getattr(found, name)) == comparable(getattr(memory, name)), name


def test_its_parts_are_of_their_types_again() -> None:
    found = Memory.decode(full().encode())
    assert type(found.random) is randomness.State
    assert type(found.tape) is End
    assert type(found.passes[0]) is PassState
    assert type(found.passes[0].made) is Moment
    assert type(found.passes[0].made.state) is randomness.State
    assert found.passes[4].first is None


def test_it_restores_the_generators() -> None:
    memory = full()
    randomness.restore(Memory.decode(memory.encode()).random)
    assert randomness.capture() == memory.random


def test_a_random_state_that_comes_twice_is_sent_once() -> None:
    memory = full()
    many = memory._replace(passes=dict.fromkeys(range(20), memory.passes[4]))
    assert len(many.encode()) < len(memory.encode()) + 2000


def test_what_cannot_be_moved_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be encoded"):
        full()._replace(scalars={"main.thing": object()}).encode()

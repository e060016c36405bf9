"""A newcomer's iterator yields what the failed rank's would have yielded next."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tpwrap.engine import randomness
from tpwrap.engine.data import Origin, iterator_at


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1) + float(np.random.rand())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(20))


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(Noisy(), 2),
    "shuffled": lambda: DataLoader(Noisy(), 2, shuffle=True),
    "worker": lambda: DataLoader(Noisy(), 2, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Stream(), 2),
    "list": lambda: [torch.tensor([float(i)]) for i in range(10)],
}


@pytest.mark.parametrize("consumed", [0, 4])
@pytest.mark.parametrize("name", LOADERS)
def test_it_goes_on_where_the_failed_rank_was(name: str, consumed: int) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    at_pass = randomness.capture()
    iterator = iter(LOADERS[name]())
    for _ in range(consumed):
        next(iterator)
        torch.rand(7)  # the training step draws random numbers too
    at_batch = randomness.capture()
    expected = [next(iterator) for _ in range(3)]
    torch.manual_seed(99)
    again = iterator_at(LOADERS[name](), Origin(0, 0, consumed, at_pass, at_batch))
    for batch in expected:
        assert torch.equal(next(again), batch)


def draw() -> list[object]:
    """An odd number of normal numbers from each: Python and NumPy draw them in pairs and keep the second one."""
    return [torch.randn(5).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random(), np.random.rand()]


@pytest.mark.parametrize("draws", [0, 1, 2, 400])
def test_capture_and_restore_are_exact(draws: int) -> None:
    for _ in range(draws):
        draw()
    state = randomness.capture()
    drawn = draw()
    assert randomness.capture() != state
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    randomness.restore(state)
    assert randomness.capture() == state
    assert draw() == drawn


def test_what_is_read_from_memory_is_what_the_generators_say() -> None:
    python, numpy = random.Random(1), np.random.RandomState(1)
    assert randomness._python_offset is not None, "another Python: see randomness._find_python"
    assert randomness._numpy_offset is not None, "another NumPy: see randomness._find_numpy"
    for _ in range(700):
        assert randomness._read_python(python, randomness._python_offset) == randomness._ask_python(python)
        assert randomness._read_numpy(numpy, randomness._numpy_offset) == randomness._ask_numpy(numpy)
        python.gauss(0, 1)
        numpy.randn()


def test_generators_that_cannot_be_read_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    random.gauss(0, 1)
    np.random.randn()
    read = randomness.capture()
    monkeypatch.setattr(randomness, "_python_offset", None)
    monkeypatch.setattr(randomness, "_numpy_offset", None)
    assert randomness.capture() == read


def test_an_unchanged_state_is_the_same_object() -> None:
    """So that it is hashed and sent once."""
    first = randomness.capture()
    random.random()
    second = randomness.capture()
    assert [a is b for a, b in zip(first, second, strict=True)] == [False, True, True, True, True, True]

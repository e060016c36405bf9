"""A newcomer's iterator yields what the failed rank's would have yielded next."""

from __future__ import annotations

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


def test_capture_and_restore_are_exact() -> None:
    state = randomness.capture()
    drawn = (torch.randn(5), np.random.randn(5))
    randomness.restore(state)
    assert torch.equal(torch.randn(5), drawn[0])
    assert np.array_equal(np.random.randn(5), drawn[1])
    randomness.restore(state)
    assert randomness.capture() == state

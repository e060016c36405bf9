"""The place in the data: which batch of which pass comes next, and how a newcomer gets there without fetching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from tpwrap.engine import randomness


@dataclass(frozen=True)
class Origin:
    """Where a step's data begins.

    epoch: value of the epoch loop. passes: how many passes over loaders had been started in that epoch before this
    one. batch: index of the step's first batch in the pass. at_pass, at_batch: random state when the pass's iterator
    was made (it seeds samplers and workers), and right before that batch was fetched.
    """

    epoch: int
    passes: int
    batch: int
    at_pass: randomness.State
    at_batch: randomness.State


def iterator_at(loader: Any, origin: Origin) -> Iterator[Any]:
    """An iterator of `loader` that yields the origin's batch next, with the random state it had then.

    A DataLoader without workers over a map-style dataset skips by drawing indices only. Everything else fetches and
    throws away the batches before: exact as well (workers' random streams advance as they did), but it takes as long
    as fetching does.
    """
    randomness.restore(origin.at_pass)
    iterator: Any = iter(loader)
    skips_indices = isinstance(iterator, _SingleProcessDataLoaderIter) and iterator._dataset_kind == _DatasetKind.Map
    for _ in range(origin.batch):
        if skips_indices:
            iterator._next_index()
            iterator._num_yielded += 1
        else:
            next(iterator)
    randomness.restore(origin.at_batch)
    found: Iterator[Any] = iterator
    return found

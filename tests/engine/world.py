"""Several ranks in one process, each with a journal of its own and real gloo between them."""

from __future__ import annotations

import datetime as dt
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tpwrap.engine import _native

SECONDS = 20.0
_names = itertools.count()
_kept: list[World] = []
"""Like the engine, we never let go of a journal: the last reference could then be dropped by one of gloo's threads,
which would have to join itself."""


class Rank:
    """One rank: journal, group, the backend that user code would see."""

    def __init__(self, rank: int, size: int, poll: bool, budget: int) -> None:
        self.rank = rank
        self.journal = _native.Journal(size, budget, 1 << 20)
        self.group = self.journal.group("world", rank, size, poll)
        self.backend = _native.JournaledBackend(self.group, "gloo")


class World:
    """`size` ranks. `connect` gives them a new generation of inner gloo backends."""

    def __init__(self, size: int, poll: bool = False, budget: int = 1 << 30) -> None:
        self.size = size
        self.store = dist.HashStore()
        self.ranks = [Rank(r, size, poll, budget) for r in range(size)]
        _kept.append(self)

    def connect(self, members: list[Rank] | None = None) -> None:
        prefix = f"generation{next(_names)}"

        def build(rank: Rank) -> None:
            store = dist.PrefixStore(prefix, self.store)
            inner = c10d.ProcessGroupGloo(store, rank.rank, self.size, dt.timedelta(seconds=SECONDS))
            rank.group.adopt(inner)

        parallel(build, members or self.ranks)

    def live(self) -> World:
        self.connect()
        for rank in self.ranks:
            rank.journal.go_live()
        return self

    def each(self, function: Callable[[Rank], Any]) -> list[Any]:
        return parallel(function, self.ranks)


def parallel(function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Run `function` for each item at once and return the results in order."""
    with ThreadPoolExecutor(len(items)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(function, item) for item in items]]


def blocked(work: Any) -> threading.Thread:
    """A thread that waits for `work`."""
    thread = threading.Thread(target=work.wait, daemon=True)
    thread.start()
    return thread

"""Passes over data loaders: counted in a live rank, answered with stubs in a newcomer, and taken up again where they
were.

What a pass draws from is decided at two moments: when its iterator is made (workers' seeds) and when its first batch is
asked for (a shuffling sampler's seed). The random state of both is kept for every pass that is not over, so that a
newcomer can make the same iterator and pass over the batches that were consumed.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from tpwrap.engine import randomness
from tpwrap.engine.script import shapes
from tpwrap.engine.script.boundary import Boundary, Mode


class Moment(NamedTuple):
    """Random state at one moment: the global generators, and those that the loader's parts own."""

    state: randomness.State
    own: dict[str, Any]


class PassState(NamedTuple):
    """What a newcomer needs to take up a pass. first: None as long as no batch was asked for."""

    made: Moment
    first: Moment | None


class Pass:
    """One pass over a loader: what `iter(loader)` returns."""

    def __init__(self, passes: Passes, loader: Any, number: int, again: bool) -> None:
        self.loader = loader
        self.again = again
        """the loader was passed over before"""
        self.number = number
        self.taken = 0
        self.over = False
        self.iterator: Iterator[Any] | None = None
        self.state: PassState | None = None
        self._passes = passes
        boundary = passes.boundary
        boundary.enter()
        try:
            if boundary.mode is not Mode.FORWARD:
                self.state = PassState(_moment(loader), None)
                self.iterator = passes.make(self)
        finally:
            boundary.leave()

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        return self._passes.next(self)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("iterator") is None:
            raise AttributeError(name)
        return getattr(self.iterator, name)


class Passes:
    """All passes of this process."""

    def __init__(self, boundary: Boundary, table: shapes.Table) -> None:
        self.boundary = boundary
        self.on_batch: Callable[[Any], None] | None = None
        """called with each batch that a live script is given"""
        self.loaders: list[Any] = []
        """in the order of their first use"""
        self.indescribable = ""
        """why batches of some loader cannot be made again, if so"""
        self._table = table
        self.count = 0
        """passes begun"""
        self._alive: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
        self._originals: dict[type, Any] = {}

    def install(self) -> None:
        self.adopt(DataLoader)

    def adopt(self, kind: type) -> None:
        """Observe the passes over this kind of loader: DataLoader, or a subclass with an `__iter__` of its own."""
        original, passes = kind.__iter__, self  # type: ignore[attr-defined]
        self._originals[kind] = original

        def __iter__(self: Any) -> Any:
            if not passes.boundary.outside:
                return original(self)
            again = any(one is self for one in passes.loaders)
            if not again:
                passes.loaders.append(self)
            made = Pass(passes, self, passes.count, again)
            passes.count += 1
            passes._alive[made.number] = made
            return made

        kind.__iter__ = __iter__  # type: ignore[attr-defined]

    def make(self, one: Pass) -> Iterator[Any]:
        """Its iterator, with the random state as it is."""
        loader = one.loader
        original = next(self._originals[kind] for kind in type(loader).__mro__ if kind in self._originals)
        if one.again and getattr(loader, "persistent_workers", False) and loader._iterator is None:
            now = _moment(loader)
            original(loader)  # the workers, which the failed rank has had since an earlier pass
            _restore(loader, now)
        iterator: Iterator[Any] = original(loader)
        return iterator

    def next(self, one: Pass) -> Any:
        boundary = self.boundary
        if not boundary.outside:
            assert one.iterator is not None
            return next(one.iterator)
        boundary.enter()
        try:
            # Asked only now: a newcomer that enters before the first batch becomes live in `enter`. Between its last
            # backward and the end of that update it has its true random state already, and takes what it needs.
            if boundary.mode is Mode.FORWARD:
                return self._stub(one)
            return self._take(one)
        finally:
            boundary.leave()

    def _take(self, one: Pass) -> Any:
        if one.iterator is None:
            _take_up(self, one)
        assert one.iterator is not None
        assert one.state is not None
        if one.state.first is None:
            one.state = PassState(one.state.made, _moment(one.loader))
        try:
            batch = next(one.iterator)
        except StopIteration:
            self._end(one)
            self.boundary.tape.record("b", 0, None)
            raise
        one.taken += 1
        try:
            recorded = self._table.number(batch)
        except shapes.Indescribable as error:
            self.indescribable = self.indescribable or f"a batch holds {error}"
            recorded = (-1, ("plain", None))
        self.boundary.tape.record("b", 0, recorded)
        if self.on_batch is not None and self.boundary.mode is Mode.LIVE:
            self.on_batch(batch)
        return batch

    def _stub(self, one: Pass) -> Any:
        recorded = self.boundary.cross("b", lambda: None, 0)
        if recorded is None:
            self._end(one)
            raise StopIteration
        one.taken += 1
        try:
            return shapes.stub(self._table.look_up(recorded))
        except shapes.Indescribable as error:
            self.boundary.fail(f"a batch holds {error}")

    def _end(self, one: Pass) -> None:
        one.over = True
        self._alive.pop(one.number, None)

    def ready(self, loader: Any) -> None:
        """Somebody asks the loader itself where it is: passes that are to be taken up are taken up now."""
        for one in list(self._alive.values()):
            if one.loader is loader and one.iterator is None and one.state is not None and not one.over:
                _take_up(self, one)

    # --- the sidecar's part -----------------------------------------------------------------------

    def states(self) -> dict[int, PassState]:
        """Of the passes that are not over, by number."""
        return {number: one.state for number, one in self._alive.items() if one.state is not None and not one.over}

    def own_generators(self) -> list[dict[str, Any]]:
        """States of generators that loaders own, in the order in which the loaders were first used."""
        return [_own(loader) for loader in self.loaders]

    def restore(self, states: dict[int, PassState], own: list[dict[str, Any]]) -> list[int]:
        """A newcomer's passes and loaders get what the failed rank's had. Returns passes that only one of them has."""
        for loader, generators in zip(self.loaders, own, strict=False):
            for path, generator in _generators(loader):
                if path in generators:
                    _set(generator, generators[path])
        mine = {number for number, one in self._alive.items() if not one.over}
        for number in mine & states.keys():
            self._alive[number].state = states[number]
        return sorted(mine - states.keys())


def _take_up(passes: Passes, one: Pass) -> None:
    """Make the iterator of a pass of the failed rank, and pass over the batches that it had taken."""
    assert one.state is not None
    now = _moment(one.loader)
    made, first = one.state
    _restore(one.loader, made)
    iterator: Any = passes.make(one)
    if first is not None:
        _restore(one.loader, first)
        indices_only = isinstance(iterator, _SingleProcessDataLoaderIter) and iterator._dataset_kind == _DatasetKind.Map
        for _ in range(one.taken):
            if indices_only:
                iterator._next_index()
                iterator._num_yielded += 1
            else:
                next(iterator)
    one.iterator = iterator
    _restore(one.loader, now)


def _moment(loader: Any) -> Moment:
    return Moment(randomness.capture(), _own(loader))


def _restore(loader: Any, moment: Moment) -> None:
    randomness.restore(moment.state)
    for path, generator in _generators(loader):
        if path in moment.own:
            _set(generator, moment.own[path])


def _own(loader: Any) -> dict[str, Any]:
    return {path: _get(generator) for path, generator in _generators(loader)}


def _generators(loader: Any) -> list[tuple[str, Any]]:
    """Random generators that a loader or its dataset, sampler or collate function hold as attributes."""
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("loader", loader)]
    while stack:
        path, owner = stack.pop()
        if id(owner) in seen or len(found) > 64:
            continue
        seen.add(id(owner))
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, random.SystemRandom):
                continue
            if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
                found.append((f"{path}.{name}", value))
            elif name in _PARTS and isinstance(value, (list, tuple)):
                stack += [(f"{path}.{name}[{i}]", one) for i, one in enumerate(value)]
            elif name in _PARTS and value is not None:
                stack.append((f"{path}.{name}", value))
    return found


_PARTS = {"dataset", "sampler", "batch_sampler", "transform", "transforms", "target_transform", "collate_fn",
          "datasets"}  # fmt: skip


def _get(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return list(generator.get_state(legacy=True))
    return generator.bit_generator.state


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(tuple(state))
    else:
        generator.bit_generator.state = state

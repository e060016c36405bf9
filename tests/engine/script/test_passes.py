"""A newcomer takes up passes over loaders where the failed rank was: the next batches, and all random draws after them,
are equal bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from tpwrap.engine import randomness
from tpwrap.engine.script import shapes
from tpwrap.engine.script.boundary import Boundary, Mode
from tpwrap.engine.script.passes import Passes
from tpwrap.engine.script.tape import Tape


class GaveUp(RuntimeError):
    pass


def fail(reason: str) -> NoReturn:
    raise GaveUp(reason)


# --- datasets -------------------------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Draws from every global generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index)) + torch.rand(2), random.random(), float(np.random.rand())


class Owning(Dataset[Any]):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.python = random.Random(2)
        self.new = np.random.default_rng(3)
        self.old = np.random.RandomState(4)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return (
            torch.rand(2, generator=self.torch) + index,
            self.python.random(),
            float(self.new.random()),
            float(self.old.rand()),
        )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(12):
            yield torch.rand(1) + index + random.random()


DATA = TensorDataset(torch.arange(12.0), torch.arange(12))


def collate(samples: list[Any]) -> Any:
    return {"x": torch.stack([one[0] for one in samples]), "jitter": torch.rand(1)}


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(DATA, batch_size=3),
    "shuffled": lambda: DataLoader(DATA, batch_size=3, shuffle=True),
    "last dropped": lambda: DataLoader(DATA, batch_size=5, shuffle=True, drop_last=True),
    "ragged": lambda: DataLoader(DATA, batch_size=5),
    "own generator": lambda: DataLoader(DATA, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "sampler": lambda: DataLoader(DATA, batch_size=3, sampler=WeightedRandomSampler([0.1] * 12, 12)),
    "unbatched": lambda: DataLoader(DATA, batch_size=None, shuffle=True),
    "augmented": lambda: DataLoader(Augmented(), batch_size=3, shuffle=True),
    "dataset's generators": lambda: DataLoader(Owning(), batch_size=3, shuffle=True),
    "collate draws": lambda: DataLoader(DATA, batch_size=3, shuffle=True, collate_fn=collate),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "strings": lambda: DataLoader([{"text": f"line {i}", "n": i} for i in range(12)], batch_size=3, shuffle=True),  # type: ignore[arg-type]
}
WORKERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "workers": lambda: DataLoader(Augmented(), batch_size=3, shuffle=True, num_workers=2),
    "workers, own generator": lambda: DataLoader(
        Augmented(), batch_size=3, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(5)
    ),
    "workers, stream": lambda: DataLoader(Stream(), batch_size=3, num_workers=2),
}


# --- two ranks in one process -----------------------------------------------------------------------------


class Rank:
    """A script's process: its loaders, what it has been given, and where it is in its script."""

    original = DataLoader.__iter__

    def __init__(self, script: Callable[..., Iterator[Any]], *makers: Callable[[], DataLoader[Any]]) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.boundary = Boundary(Tape(), fail)
        self.passes = Passes(self.boundary, shapes.Table())
        self._here = randomness.capture()
        self._script = script(*(make() for make in makers))

    def go(self, steps: int) -> list[Any]:
        """So many steps of the script, with this process's generators and its own patch of DataLoader."""
        elsewhere, patched = randomness.capture(), DataLoader.__iter__
        randomness.restore(self._here)
        self.boundary.settle_draws()
        DataLoader.__iter__ = Rank.original  # type: ignore[method-assign]
        self.passes.install()
        try:
            found = [one for _, one in zip(range(steps), self._script, strict=False)]
            self.boundary.enter()  # backward, say: what was drawn before it is published with it
            self.boundary.leave()
            return found
        finally:
            self._here = randomness.capture()
            randomness.restore(elsewhere)
            DataLoader.__iter__ = patched  # type: ignore[method-assign]

    def draws(self) -> tuple[Any, ...]:
        """What the global generators would draw next."""
        return self._here

    def become(self, of: Rank) -> None:
        """A newcomer at its last backward pass gets what only the failed rank had."""
        states = of.passes.states()
        odd = self.passes.restore(states, of.passes.own_generators())
        assert odd == []
        self._here = of._here
        self.boundary.mode = Mode.LIVE

    @staticmethod
    def newcomer(of: Rank, script: Callable[..., Iterator[Any]], *makers: Callable[[], DataLoader[Any]]) -> Rank:
        made = Rank(script, *makers)
        end, closed = of.boundary.tape.seal()
        made.boundary.tape.load([closed] if closed is not None else [], end)
        made.boundary.load_draws()
        made.boundary.mode = Mode.FORWARD
        return made


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def alike(one: Any, other: Any) -> bool:
    """Of the same structure: what a stub is to its batch. Values that are no tensors are equal."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def check(script: Callable[..., Iterator[Any]], at: int, *makers: Callable[[], DataLoader[Any]], more: int = 9) -> None:
    """The rank fails after `at` steps of the script; compare the newcomer's further steps with those it would do."""
    alone = Rank(script, *makers)
    taken = alone.go(at)
    newcomer = Rank.newcomer(alone, script, *makers)
    assert all(map(alike, taken, newcomer.go(at)))
    assert newcomer.boundary.tape.left == 0
    newcomer.become(alone)
    for _ in range(more):
        expected, found = alone.go(1), newcomer.go(1)
        assert same(expected, found)
        assert newcomer.draws() == alone.draws()
        if not expected:
            return


def epochs(loader: Any) -> Iterator[Any]:
    for _ in range(3):
        yield from loader


def broken_off(loader: Any) -> Iterator[Any]:
    """An epoch ends early, in the middle of a pass."""
    for _ in range(4):
        for i, batch in enumerate(loader):
            yield batch
            if i == 1:
                break


def by_hand(loader: Any) -> Iterator[Any]:
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            iterator = iter(loader)


def several(one: Any, other: Any) -> Iterator[Any]:
    """Two passes at once, the second begun in the middle of the first, and a third over the first's loader."""
    for i, batch in enumerate(one):
        yield batch
        if i == 1:
            yield from zip(other, one, strict=False)
    yield from one


def drawing(loader: Any) -> Iterator[Any]:
    """The script itself draws between batches."""
    for batch in epochs(loader):
        yield batch, random.random(), float(np.random.rand())


def not_yet(loader: Any) -> Iterator[Any]:
    """The iterator is made one step before its first batch."""
    for _ in range(2):
        iterator = iter(loader)
        yield "made"
        torch.rand(1)
        yield "drawn"
        yield from iterator


@pytest.mark.parametrize("at", [1, 4, 6])
@pytest.mark.parametrize("name", LOADERS)
def test_the_next_batches_are_the_failed_ranks(name: str, at: int) -> None:
    check(epochs, at, LOADERS[name])


@pytest.mark.parametrize("script", [broken_off, by_hand, not_yet])
@pytest.mark.parametrize("name", ["shuffled", "own generator", "augmented", "stream"])
def test_however_the_script_goes_through_its_loader(script: Callable[..., Iterator[Any]], name: str) -> None:
    for at in (1, 2, 3, 5):
        check(script, at, LOADERS[name])


@pytest.mark.parametrize("names", [("shuffled", "augmented"), ("own generator", "stream"), ("stream", "in order")])
@pytest.mark.parametrize("at", [1, 3, 5, 7])
def test_with_several_passes_at_once(names: tuple[str, str], at: int) -> None:
    check(several, at, LOADERS[names[0]], LOADERS[names[1]])


@pytest.mark.parametrize("name", ["shuffled", "augmented", "dataset's generators"])
@pytest.mark.parametrize("at", [2, 5])
def test_with_draws_by_the_script_itself(name: str, at: int) -> None:
    check(drawing, at, LOADERS[name])


@pytest.mark.parametrize(("name", "at"), [("workers", 2), ("workers", 5), ("workers, own generator", 2),
                                          ("workers, stream", 3)])  # fmt: skip
def test_with_workers(name: str, at: int) -> None:
    check(epochs, at, WORKERS[name], more=4)


@pytest.mark.parametrize("at", [2, 4, 6])
def test_with_workers_that_stay(at: int) -> None:
    check(
        epochs, at, lambda: DataLoader(DATA, batch_size=3, shuffle=True, num_workers=1, persistent_workers=True), more=4
    )


# --- what is known of them ------------------------------------------------------------------------------


def test_passes_that_are_over_or_given_up_are_forgotten() -> None:
    rank = Rank(broken_off, LOADERS["shuffled"])
    rank.go(2)
    assert list(rank.passes.states()) == [0]
    rank.go(1)
    assert list(rank.passes.states()) == [1]
    assert rank.passes.count == 2
    rank = Rank(epochs, LOADERS["shuffled"])
    rank.go(5)
    assert list(rank.passes.states()) == [1]
    assert len(rank.passes.loaders) == 1


def test_a_pass_that_only_the_newcomer_has_is_told() -> None:
    alone = Rank(epochs, LOADERS["shuffled"])
    alone.go(2)
    newcomer = Rank.newcomer(alone, epochs, LOADERS["shuffled"])
    newcomer.go(2)
    assert newcomer.passes.restore({}, []) == [0]


def test_batches_are_stubs_in_a_newcomer() -> None:
    alone = Rank(epochs, LOADERS["in order"])
    alone.go(2)
    newcomer = Rank.newcomer(alone, epochs, LOADERS["in order"])
    (x, y), _ = newcomer.go(2)
    assert not x.any()
    assert not y.any()
    with pytest.raises(GaveUp, match="asks for a batch after the end of what was recorded"):
        newcomer.go(1)


def test_a_batch_that_cannot_be_made_again_is_told_live_and_the_training_goes_on() -> None:
    rank = Rank(epochs, lambda: DataLoader(DATA, batch_size=3, collate_fn=lambda samples: [object(), samples[0][0]]))
    assert len(rank.go(2)) == 2
    assert "object" in rank.passes.indescribable


def test_a_live_script_is_given_the_batches_that_on_batch_sees() -> None:
    rank, seen = Rank(epochs, LOADERS["in order"]), list[Any]()
    rank.passes.on_batch = seen.append
    assert same(rank.go(3), seen)


def test_a_loop_in_a_region_is_not_the_scripts() -> None:
    rank = Rank(epochs, LOADERS["in order"])
    with rank.boundary.aside():
        rank.go(2)
    assert rank.passes.loaders == []
    assert rank.boundary.tape.count == 0


def test_a_pass_has_the_length_and_the_attributes_of_its_iterator() -> None:
    loader = LOADERS["ragged"]()

    def script(loader: Any) -> Iterator[Any]:
        iterator = iter(loader)
        yield len(iterator), iter(iterator) is iterator, iterator._num_yielded
        yield next(iterator)
        yield iterator._num_yielded
        with pytest.raises(AttributeError):
            iterator.nothing_like_that  # noqa: B018

    found = Rank(script, lambda: loader).go(4)
    assert found[0] == (3, True, 0)
    assert found[2] == 1

"""The two lines that users write: `tp = tpwrap.session(...)` and `for batch in tp.batches(loader)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpwrap.engine import runtime
from tpwrap.engine.randomness import State
from tpwrap.engine.steps import Steps


class Session:
    """A training loop that survives failures.

    step: optimizer updates applied so far. epoch: value of the epoch loop. batch_index: index of the current batch in
    this pass over the loader, from 0.

    Without tpwrap (plain Python, torchrun) it counts, and changes nothing.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any | None) -> None:
        self.step = 0
        self.epoch = 0
        self.batch_index = -1
        self._passes = 0
        self._in_epochs = False
        self._registered: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        engine = runtime.current()
        self._steps = None if engine is None else Steps(engine, self, model, optimizer, scheduler)
        if self._steps is None:
            self._count_steps(optimizer)

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """`range(start, count)`, which a newcomer enters at the epoch of the failed rank.

        Needed wherever the loop over a loader is itself in a loop. start: for scripts that resume from a checkpoint.
        """
        self._in_epochs = True
        first = start if self._steps is None else self._steps.first_epoch(start)
        for epoch in range(first, count):
            self.epoch = epoch
            self._passes = 0
            yield epoch
        self._in_epochs = False

    def batches(self, loader: Any) -> Batches:
        """Iterate over `loader`; a newcomer enters at the batch of the failed rank.

        Raises RuntimeError at the second pass outside `tp.epochs`: a newcomer could not find its way there.
        """
        if self._passes > 0 and not self._in_epochs:
            raise RuntimeError(
                "tp.batches() is in a loop that a replacement could not enter in the middle; "
                "write `for epoch in tp.epochs(N):` around it"
            )
        self._passes += 1
        self.batch_index = -1
        return Batches(self, loader, self._passes - 1)

    def register(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        """Protect further rank-local state, for instance a history list or a meter.

        get: returns plain data (None, numbers, str, bytes, list, tuple, set, dict, NumPy arrays, tensors); called once
        a step, at the start of backward. set: gives it to a newcomer, which then continues after optimizer.step().
        Raises TypeError now if `get()` returns what cannot be moved, ValueError if the name is taken.
        """
        if name in self._registered:
            raise ValueError(f"tp.register: {name!r} is registered already; choose another name")
        from tpwrap.engine import encoding

        encoding.encode({name: get()})
        self._registered[name] = (get, set)

    def _count_steps(self, optimizer: torch.optim.Optimizer) -> None:
        def count(*_: Any) -> None:
            self.step += 1

        optimizer.register_step_post_hook(count)


class Batches:
    """One pass over a loader."""

    def __init__(self, session: Session, loader: Any, passes: int) -> None:
        self.loader = loader
        self.passes = passes
        """passes over loaders that came before this one in the epoch"""
        self.iterator: Iterator[Any] | None = None
        self.at_pass: State
        """random state when the iterator was made; set then"""
        self._session = session

    def __iter__(self) -> Batches:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        steps = self._session._steps
        if steps is not None:
            steps.before_batch(self)
        if self.iterator is None:
            self.iterator = iter(self.loader)
        batch = next(self.iterator)
        self._session.batch_index += 1
        if steps is not None:
            steps.batch_taken(batch)
        return batch


def session(*, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any | None = None) -> Session:
    """Protect a training loop. Call it once, after the model is wrapped and the optimizer (and scheduler) are made.

    model: the module, wrapped in DDP or not. One `optimizer.step()` is one step.

    A newcomer goes on right after `optimizer.step()`: there, of all that the loop's body computed before, only the
    tensors given to `backward()` have their true values. Log those, and see docs/limits.md for the rest.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"tpwrap.session: model is a {type(model).__name__}; give a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"tpwrap.session: optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise TypeError(f"tpwrap.session: scheduler is a {type(scheduler).__name__} without state_dict()")
    return Session(model, optimizer, scheduler)

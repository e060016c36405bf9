"""The two lines that users write: `tp = tpwrap.session(...)` and `for batch in tp.batches(loader)`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, overload

import torch

from tpwrap.engine import runtime
from tpwrap.engine.randomness import State
from tpwrap.engine.redo import Redo
from tpwrap.engine.steps import Steps

P = ParamSpec("P")
T = TypeVar("T")


class Session:
    """A training loop that survives failures.

    updates: optimizer updates applied so far. epoch: value of the epoch loop. batch_index: index of the current batch
    in this pass over the loader, from 0.

    Without tpwrap (plain Python, torchrun) it counts, and changes nothing.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any | None, shard: str = ""
    ) -> None:
        self.updates = 0
        self.shard = shard
        self.epoch = 0
        self.batch_index = -1
        self._passes = 0
        self._in_epochs = False
        self._served: list[Any] = []
        """batches since the last update, kept where a body of the loop may run again"""
        self._again: list[Any] = []
        """of these, what is to be served once more"""
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

    @overload
    def step(self, body: None = None) -> contextlib.AbstractContextManager[None]: ...

    @overload
    def step(self, body: Callable[P, T]) -> Callable[P, T]: ...

    def step(self, body: Callable[P, T] | None = None) -> Callable[P, T] | contextlib.AbstractContextManager[None]:
        """Say what may run again after a failure: a function that does one step,

            @tp.step
            def train(batch): ...  # forward, backward, optimizer.step(), scheduler.step()

        or the whole body of the loop, `with tp.step():`. For models whose collectives of one step do not fit into
        memory for replay (TORCHPASS_REPLAY_BUDGET_MB). Whatever the body changes beside model, optimizer, scheduler,
        scalers and random state must be registered, or set anew each time; a loop's body that is redone gets the same
        batches again, and nothing may come after the `with` in it.
        """
        engine = runtime.current()
        if body is None:
            return _Block(self, None if engine is None else engine.redo)

        @functools.wraps(body)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if engine is None or self._steps is None or self._steps.offline:
                return body(*args, **kwargs)
            return engine.redo.run(lambda: body(*args, **kwargs))

        return run

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

    def _serve_again(self) -> None:
        self._again = list(self._served)
        self.batch_index -= 1  # it was noted when the first of them had been taken

    def _count_steps(self, optimizer: torch.optim.Optimizer) -> None:
        def count(*_: Any) -> None:
            self.updates += 1

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
        session, steps = self._session, self._session._steps
        engine = runtime.current()
        if engine is not None and engine.redo.between():
            session._serve_again()
        if session._again:
            session.batch_index += 1
            return session._again.pop(0)
        if steps is not None:
            steps.before_batch(self)
        if self.iterator is None:
            self.iterator = iter(self.loader)
        batch = next(self.iterator)
        session.batch_index += 1
        if steps is not None:
            steps.batch_taken(batch)
            session._served.append(batch)
        return batch


class _Block(contextlib.AbstractContextManager[None]):
    """The body of a loop that may come round again with the same batches."""

    def __init__(self, session: Session, redo: Redo | None) -> None:
        self._session = session
        self._redo = redo

    def __enter__(self) -> None:
        steps = self._session._steps
        if self._redo is not None and steps is not None and not steps.offline:
            self._redo.enter()

    def __exit__(self, *_: object) -> bool:
        if self._redo is None or not self._redo.leave():
            return False
        self._session._serve_again()
        return True


def session(
    *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any | None = None, shard: str = ""
) -> Session:
    """Protect a training loop. Call it once, after the model is wrapped and the optimizer (and scheduler) are made.

    model: the module, wrapped in DDP, sharded by FSDP2, or neither. One `optimizer.step()` is one step.
    shard: a name for what this rank holds, equal on all ranks that hold the same; only where the engine finds it
    wrongly (it says at the first update what it has found).

    A newcomer goes on right after `optimizer.step()`: there, of all that the loop's body computed before, only the
    tensors given to `backward()` have their true values. Log those, and see docs/limits.md for the rest.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"tpwrap.session: model is a {type(model).__name__}; give a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"tpwrap.session: optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise TypeError(f"tpwrap.session: scheduler is a {type(scheduler).__name__} without state_dict()")
    return Session(model, optimizer, scheduler, shard)

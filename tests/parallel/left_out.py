"""Sabotage: one item of the state is left out of what a newcomer is given, on all ranks alike, so that the engine's own
comparison of digests does not see it. Applied in a worker before its session begins."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tpwrap.engine import buffers, data, randomness, scalers, state, steps


def _tensors(prefix: str) -> None:
    original = state.ReplicaState._tensors

    def without(self: Any) -> Iterator[Any]:
        return (entry for entry in original(self) if not entry[0].startswith(prefix))

    state.ReplicaState._tensors = without  # type: ignore[method-assign]


def parameters() -> None:
    _tensors("model/")


def optimizer_state() -> None:
    _tensors("optimizer/")


def param_groups() -> None:
    original = state.pack_optimizer

    def without(*args: Any) -> dict[str, Any]:
        packed = original(*args)
        return {**packed, "groups": [{} for _ in packed["groups"]]}

    state.pack_optimizer = without


def scheduler() -> None:
    state.pack_object = lambda *args: {"own": {}, "parts": {}}
    state.restore_object = lambda *args: None


def scaler() -> None:
    scalers.restore = lambda states: None


def model_buffers() -> None:
    buffers.LocalBuffers.changed = lambda self: {}  # type: ignore[method-assign]


def losses() -> None:
    _of_sidecar(losses=[])


def average() -> None:
    _not_registered("average")


def history() -> None:
    _not_registered("history")


def _not_registered(name: str) -> None:
    original = steps.Sidecar.decode

    def without(blob: bytes) -> Any:
        sidecar = original(blob)
        return sidecar._replace(registered={k: v for k, v in sidecar.registered.items() if k != name})

    steps.Sidecar.decode = staticmethod(without)  # type: ignore[method-assign]


def _of_sidecar(**fields: Any) -> None:
    original = steps.Sidecar.decode
    steps.Sidecar.decode = staticmethod(lambda blob: original(blob)._replace(**fields))  # type: ignore[method-assign]


def random_python() -> None:
    _not_restored(lambda: (random.getstate, random.setstate))


def random_numpy() -> None:
    _not_restored(lambda: (np.random.get_state, np.random.set_state))


def random_torch() -> None:
    _not_restored(lambda: (torch.get_rng_state, torch.set_rng_state))


def _not_restored(generator: Callable[[], tuple[Any, Any]]) -> None:
    original = randomness.restore
    get, put = generator()

    def without(everything: Any) -> None:
        before = get()
        original(everything)
        put(before)

    randomness.restore = without


def _origin(**changed: Callable[[Any], Any]) -> None:
    """The place in the data is another one."""
    original = steps.Steps._offline_origin

    def other(self: Any) -> Any:
        origin = original(self)
        return dataclasses.replace(origin, **{field: change(origin) for field, change in changed.items()})

    steps.Steps._offline_origin = other  # type: ignore[method-assign]


def accumulation_position() -> None:
    """The last batch is known, and not that the window began before it."""
    _origin(batch=lambda origin: origin.batch + 1)


def data_position() -> None:
    _origin(batch=lambda origin: 0)


def sampler_epoch() -> None:
    _origin(epoch=lambda origin: 0)


def worker_seeds() -> None:
    """What the loader's iterator draws when it is made: seeds of workers, an order."""
    original = data.iterator_at

    def without(loader: Any, origin: Any) -> Any:
        return original(loader, dataclasses.replace(origin, at_pass=randomness.capture()))

    steps.iterator_at = without


def nothing() -> None:
    """For comparison."""


def apply(item: str) -> None:
    ITEMS[item]()


ITEMS: dict[str, Callable[[], None]] = {
    item.__name__: item
    for item in (
        nothing, parameters, optimizer_state, param_groups, scheduler, scaler, model_buffers, losses, average, history,
        random_python, random_numpy, random_torch, accumulation_position, data_position, sampler_epoch, worker_seeds,
    )
}  # fmt: skip

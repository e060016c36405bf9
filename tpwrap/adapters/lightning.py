"""Lightning, as `lightning` or `pytorch_lightning`.

* It runs the script's whole training_step inside the call of the DDP module: so that call is not a region of its own,
  and what training_step calls in it is (`_redirect`).
* It hands forward and backward to the optimizer as a closure. Every optimizer but LBFGS calls that once, before all
  else: so it is called before `optimizer.step()` instead (`_precision`).
* A checkpoint whose file is there gets a version in its name. Right after a newcomer's entry it can be there because
  the failed rank has just written it (`_versions`).
* It saves through a buffer in memory, which may be large: that is left out on a newcomer's way (`_saving`).
"""

from __future__ import annotations

import functools
import math
import os
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tpwrap.adapters.places import Places


def apply(places: Places, module: ModuleType) -> None:
    part = module.__name__.rpartition(".")[2]
    parts = {"strategy": _redirect, "precision": _precision, "cloud_io": _saving, "model_checkpoint": _versions}
    parts[part](places, module)


def _redirect(places: Places, module: Any) -> None:
    redirection = module._ForwardRedirection
    original = redirection.__call__
    regions = places.regions

    @functools.wraps(original)
    def call(self: Any, wrapper: Any, inner: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if not places.boundary.outside:
            return original(self, wrapper, inner, method, *args, **kwargs)
        regions.found(wrapper)
        name = method if isinstance(method, str) else method.__name__
        training = name == "training_step" and torch.is_grad_enabled()
        if places.skipping and not (training and regions.for_real(wrapper)):
            return getattr(inner, name)(*args, **kwargs)
        # The call goes through the wrapper and ends in the script's method: neither of the two modules is a region on
        # that way, and within the method the inner one is again.
        regions.see_through(wrapper, True)
        regions.see_through(inner, True)
        regions.through += 1

        def arrived(*_: Any, **__: Any) -> None:
            regions.see_through(inner, False)

        try:
            with _before(inner, name, arrived):
                return original(self, wrapper, inner, method, *args, **kwargs)
        finally:
            regions.through -= 1
            regions.see_through(inner, False)
            regions.see_through(wrapper, False)

    redirection.__call__ = call


class _before:
    """While this is entered, `then` is called at the start of owner.name()."""

    def __init__(self, owner: Any, name: str, then: Callable[[], None]) -> None:
        self._attributes, self._name, self._then = vars(owner), name, then
        self._method = getattr(owner, name)
        self._own = name in self._attributes

    def __enter__(self) -> None:
        method, then = self._method, self._then

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            then()
            return method(*args, **kwargs)

        self._attributes[self._name] = call

    def __exit__(self, *_: object) -> None:
        if self._own:
            self._attributes[self._name] = self._method
        else:
            del self._attributes[self._name]


def _precision(places: Places, module: Any) -> None:
    precision = module.Precision
    original = precision.optimizer_step

    @functools.wraps(original)
    def optimizer_step(self: Any, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS) or not places.boundary.outside:
            return original(self, optimizer, model=model, closure=closure, **kwargs)
        with torch.enable_grad():  # as optimizers call a closure
            result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    precision.optimizer_step = optimizer_step


def _saving(places: Places, module: Any) -> None:
    places.skipped_everywhere(module, "_atomic_save")


def _versions(places: Places, module: Any) -> None:
    checkpoint = module.ModelCheckpoint
    make, exists = checkpoint.__init__, checkpoint.file_exists
    begun: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        begun[self] = places.cross(time.time) if places.boundary.outside else time.time()

    @functools.wraps(exists)
    def file_exists(self: Any, filepath: Any, trainer: Any) -> Any:
        if places.redoing and os.path.exists(filepath) and os.stat(filepath).st_mtime >= begun.get(self, math.inf):
            files, self._fs = self._fs, _Nothing()
            try:
                return exists(self, filepath, trainer)
            finally:
                self._fs = files
        return exists(self, filepath, trainer)

    checkpoint.__init__, checkpoint.file_exists = init, file_exists


class _Nothing:
    """A file system without files."""

    def exists(self, path: Any) -> bool:
        return False

"""What the engine has recognised of a script, in the words of `tpwrap.core.lint`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from tpwrap.core.lint import Facts, Loader, Model, Place
from tpwrap.engine.script.files import is_script_file

_USUAL = (SequentialSampler, RandomSampler, DistributedSampler, BatchSampler)


def gather(
    *,
    step: int,
    world_size: int,
    loaders: Iterable[Any],
    models: Iterable[torch.nn.Module],
    optimizers: Iterable[Any],
    schedulers: Iterable[Any] = (),
    scalers: Iterable[Any] = (),
    **known: Any,
) -> Facts:
    """Facts from what the script uses. known: the fields of `Facts` that are known already."""
    return Facts(
        script=os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "the script",
        step=step,
        world_size=world_size,
        loaders=tuple(loader(one) for one in loaders),
        models=tuple(model(one) for one in models),
        optimizers=_names(optimizers),
        schedulers=_names(schedulers),
        scalers=_names(scaler for scaler in scalers if scaler.is_enabled()),
        **known,
    )


def loader(loader: Any, where: str = "") -> Loader:
    """where, here and below: see `Loader.where`."""
    if not isinstance(loader, DataLoader):
        return Loader("own", where=where)
    workers, persistent = loader.num_workers, bool(loader.persistent_workers)
    if isinstance(loader.dataset, IterableDataset):
        return Loader("iterable", None, workers, persistent, where=where)
    samplers = (loader.batch_sampler, loader.sampler)
    own = [type(one).__name__ for one in samplers if one is not None and type(one) not in _USUAL]
    return Loader("map", _length(loader.dataset), workers, persistent, own[0] if own else "", where)


def model(module: torch.nn.Module, where: str = "") -> Model:
    inner, wrapper = module, ""
    if isinstance(module, DistributedDataParallel):
        inner, wrapper = module.module, "DDP"
    return Model(type(inner).__name__, _size(inner), wrapper, _sharding(module), where)


def threads(before: Collection[threading.Thread]) -> tuple[Place, ...]:
    """Threads that run the script's own code. before: those that were alive when the script started. (Those of
    libraries, progress bars and loaders for instance, know their own way.)"""
    found = []
    for thread in threading.enumerate():
        code = getattr(getattr(thread, "_target", None), "__code__", None) or type(thread).run.__code__
        if thread is not threading.main_thread() and thread not in before and is_script_file(code.co_filename):
            found.append(Place(thread.name, f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"))
    return tuple(found)


def _names(things: Iterable[Any]) -> tuple[str, ...]:
    return tuple(type(one).__name__ for one in things)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _size(module: torch.nn.Module) -> int:
    lazy = torch.nn.parameter.UninitializedParameter
    return sum(parameter.numel() for parameter in module.parameters() if not isinstance(parameter, lazy))


def _sharding(module: torch.nn.Module) -> str:
    """What shards the parameters, if anything does."""
    for one in module.modules():
        name = type(one).__name__
        if name == "FullyShardedDataParallel":
            return "FSDP"
        if any(base.__name__ == "FSDPModule" for base in type(one).__mro__):
            return "FSDP2"
    for parameter in module.parameters():
        placements: Any = getattr(parameter, "placements", None) or getattr(parameter.data, "placements", ())
        if any(not placement.is_replicate() for placement in placements):
            return "DTensor"
    return ""

"""Which ranks are replicas of each other: a rank's shard, as a short name that is equal on all its replicas.

Derived from what the rank holds at its first update: the names, shapes and bytes of its parameters; for DTensors
(FSDP2, HSDP, tensor parallelism) its coordinates in those mesh dimensions in which they are sharded, because two shards
may start with equal bytes (zeros) and then differ; for DDP the ranks it averages with; for ZeroRedundancyOptimizer its
place among the ranks that share the optimizer's state. Pipeline stages and hand-made partitions differ by their
parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from tpwrap.engine import _native, ddp
from tpwrap.engine.dtensors import is_dtensor, local
from tpwrap.engine.state import loaded

FLATTENED = (
    "FullyShardedDataParallel keeps its parameters in flat pieces that the engine cannot name; "
    "use torch.distributed.fsdp.fully_shard (FSDP2)"
)


def flattened(model: torch.nn.Module) -> bool:
    """Whether it is sharded by FSDP1."""
    kind = loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    return any(isinstance(module, kind) for module in model.modules())


def sharded(model: torch.nn.Module) -> bool:
    """Whether ranks are known to hold different pieces of it."""
    return flattened(model) or any(map(is_dtensor, model.parameters()))


def shard(named: Iterable[tuple[str, torch.nn.Parameter]], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """The name of this rank's shard, which holds the parameters of `named`. Call it between updates, where nobody
    changes them."""
    parameters = dict(named)
    digests = _native.digests([local(parameter) for parameter in parameters.values()])
    parts: list[object] = [
        (name, tuple(local(parameter).shape), _coordinates(parameter), digest)
        for (name, parameter), digest in zip(parameters.items(), digests, strict=True)
    ]
    parts += sorted(tuple(dist.get_process_group_ranks(instance.process_group)) for instance in ddp.instances())
    partitioned = loaded("torch.distributed.optim", "ZeroRedundancyOptimizer")
    parts += [(one.rank, one.world_size) for one in optimizers if isinstance(one, partitioned)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _coordinates(parameter: Any) -> tuple[tuple[int, int], ...]:
    """(mesh dimension, position in it) where the parameter is not the same on all."""
    if not is_dtensor(parameter):
        return ()
    coordinate: list[int] = parameter.device_mesh.get_coordinate() or []
    return tuple(
        (dimension, position)
        for dimension, (position, placement) in enumerate(zip(coordinate, parameter.placements, strict=False))
        if not placement.is_replicate()
    )

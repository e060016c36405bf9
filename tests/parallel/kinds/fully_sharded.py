"""Parameters, gradients and optimizer state in shards: FSDP2, its hybrid with replicas (HSDP), and FSDP1's hybrid."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.parallel.kinds.base import Trainee
from tests.parallel.parts import Block, Net, Options


def sharded(net: Net, mesh: DeviceMesh, options: Options) -> Net:
    policy = MixedPrecisionPolicy()
    if options.precision == "mixed_policy":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net


class FullySharded(Trainee):
    def __init__(self, options: Options, mesh: DeviceMesh) -> None:
        super().__init__(options, sharded(Net(options), mesh, options))

    @contextlib.contextmanager
    def synchronized(self, last: bool) -> Any:
        self.model.set_requires_gradient_sync(last)
        yield


def fsdp2(options: Options) -> Trainee:
    return FullySharded(options, init_device_mesh("cpu", (4,)))


def hsdp(options: Options) -> Trainee:
    return FullySharded(options, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


class FlatHybrid(Trainee):
    def __init__(self, options: Options) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = FullyShardedDataParallel(
            Net(options),
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        super().__init__(options, model)

    def synchronized(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self.model.no_sync()

    def clip(self) -> None:
        self.model.clip_grad_norm_(0.5)


def fsdp1_hybrid(options: Options) -> Trainee:
    return FlatHybrid(options)

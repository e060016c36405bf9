"""DistributedDataParallel: plain, with communication hooks, compiled, with sharded optimizer state."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.parallel.kinds.base import Trainee
from tests.parallel.parts import Net, Options


class Replicated(Trainee):
    """Several buckets, unless told otherwise."""

    def __init__(self, options: Options, bucket_cap_mb: float | None = 0.001) -> None:
        super().__init__(options, DDP(Net(options), bucket_cap_mb=bucket_cap_mb))

    def synchronized(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self.model.no_sync()


def ddp(options: Options) -> Trainee:
    return Replicated(options)


def ddp_bf16_hook(options: Options) -> Trainee:
    trainee = Replicated(options)
    trainee.model.register_comm_hook(None, _bf16)
    return trainee


def _bf16(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants annotations that are no text, or none
    return default_hooks.bf16_compress_hook(state, bucket)  # which by that name is refused without a GPU


def ddp_powersgd(options: Options) -> Trainee:
    """The hook keeps a low-rank memory and the error of each bucket from step to step. One bucket only: the hook waits
    inside of callbacks, which with several buckets takes all threads of gloo."""
    trainee = Replicated(options, bucket_cap_mb=None)
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
    trainee.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trainee


class SharedOptimizer(Replicated):
    """Each rank of `group` holds the optimizer state of a part of the parameters, and applies their updates."""

    group: Any = None

    def optimizer(self) -> torch.optim.Optimizer:
        kinds = {
            "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
            "adamw_foreach": (torch.optim.AdamW, {"lr": 0.02, "foreach": True}),
            "adamw_fused": (torch.optim.AdamW, {"lr": 0.02, "fused": True}),
            "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
        }
        kind, settings = kinds[self.options.optimizer]
        return ZeroRedundancyOptimizer(self.parameters(), kind, self.group, **settings)


def zero(options: Options) -> Trainee:
    return SharedOptimizer(options)


def zero_hybrid(options: Options) -> Trainee:
    """Parts of the optimizer state on two ranks, and again on the two others."""
    trainee = SharedOptimizer(options)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    trainee.group = halves[dist.get_rank() // 2]
    trainee.shard = f"part {dist.get_rank() % 2}"
    return trainee


def compiled_eager(options: Options) -> Trainee:
    return Compiled(options, "eager")


def compiled_aot_eager(options: Options) -> Trainee:
    return Compiled(options, "aot_eager")


class Compiled(Replicated):
    def __init__(self, options: Options, backend: str) -> None:
        super().__init__(options, bucket_cap_mb=None)
        self._forward = torch.compile(self.model, backend=backend)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self._forward(inputs).float(), targets)

"""Tensor parallel x data parallel on a 2x2 mesh: DTensor plans, and plain tensors with groups of one's own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.parallel.kinds.base import Trainee, average_gradients
from tests.parallel.parts import Block, Net, Options


def parallel(net: Net, mesh: DeviceMesh, sequence: bool = False) -> Net:
    """Cut the blocks. sequence: between them, activations are sharded along the sequence."""
    for block in net.blocks:
        if sequence:
            inner = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
            outer = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
            plan = {
                "": inner,
                "norm": SequenceParallel(use_local_output=False),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            parallelize_module(block, mesh, plan)
            parallelize_module(block, mesh, outer)
        else:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class TensorParallel(Trainee):
    def __init__(self, options: Options, sequence: bool = False) -> None:
        mesh = mesh_of_four()
        super().__init__(options, parallel(Net(options), mesh["tp"], sequence))
        self.data_rank, self.data_world = mesh["dp"].get_local_rank(), mesh["dp"].size()
        self._replicas = mesh["dp"].get_group()

    def finish(self, step: int) -> None:
        average_gradients(self.model, self._replicas)

    def clip(self) -> None:
        clip_mixed(self.model)


def clip_mixed(model: nn.Module) -> None:
    """By the norm over tensors of both sorts, whole and sharded."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    norms = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    factor = (0.5 / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        (gradient.to_local() if hasattr(gradient, "to_local") else gradient).mul_(factor)


def tp(options: Options) -> Trainee:
    return TensorParallel(options)


def tp_sequence(options: Options) -> Trainee:
    return TensorParallel(options, sequence=True)


class TensorParallelDDP(Trainee):
    """The same mesh with DDP over the data-parallel dimension."""

    def __init__(self, options: Options) -> None:
        mesh = mesh_of_four()
        net = parallel(Net(options), mesh["tp"])
        super().__init__(options, DDP(net, device_mesh=mesh["dp"], bucket_cap_mb=0.001))
        self.data_rank, self.data_world = mesh["dp"].get_local_rank(), mesh["dp"].size()

    def synchronized(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self.model.no_sync()


def tp_ddp(options: Options) -> Trainee:
    return TensorParallelDDP(options)


# --- Megatron's way -----------------------------------------------------------------------------------


class _Copied(torch.autograd.Function):
    """Whole before, and used in parts: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        value = value.contiguous().clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class HalfBlock(nn.Module):
    """This rank's columns of `up` and rows of `down`, as plain parameters."""

    def __init__(self, block: Block, part: int, group: Any) -> None:
        super().__init__()
        half = block.up.out_features // 2
        mine = slice(part * half, (part + 1) * half)
        self.group, self.norm = group, block.norm
        self.up_weight = nn.Parameter(block.up.weight.detach()[mine].clone())
        self.up_bias = nn.Parameter(block.up.bias.detach()[mine].clone())
        self.down_weight = nn.Parameter(block.down.weight.detach()[:, mine].clone())
        self.down_bias = nn.Parameter(block.down.bias.detach().clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inside = F.relu(F.linear(_Copied.apply(self.norm(hidden), self.group), self.up_weight, self.up_bias))
        return hidden + _Summed.apply(F.linear(inside, self.down_weight), self.group) + self.down_bias


class Megatron(Trainee):
    def __init__(self, options: Options) -> None:
        rank = dist.get_rank()
        tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        net = Net(options)
        for i, block in enumerate(net.blocks):
            net.blocks[i] = HalfBlock(block, rank % 2, tensor_groups[rank // 2])
        super().__init__(options, net)
        self.data_rank, self.data_world = rank // 2, 2
        self._replicas = data_groups[rank % 2]

    def finish(self, step: int) -> None:
        average_gradients(self.model, self._replicas)


def megatron(options: Options) -> Trainee:
    return Megatron(options)

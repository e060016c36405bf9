"""Context parallel x data parallel: each rank holds a part of the sequence, and gathers keys and values.

torch's own `context_parallel` knows the flash and memory-efficient attention of CUDA and none of the CPU, so the
gathering is written here, with torch's functional collectives.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, wait_tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.kinds.base import Trainee, average_gradients
from tests.parallel.parts import HIDDEN, LENGTH, Block, Net, Options


class Attention(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.block = Block()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        keys, values = (
            wait_tensor(all_gather_tensor_autograd(part.contiguous(), 1, self.group)) for part in (key, value)
        )
        return self.block(hidden + F.scaled_dot_product_attention(query, keys, values))


class Head(nn.Module):
    """A class for each place of the sequence: places are then averaged over, on all ranks."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.linear = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)


class ContextParallel(Trainee):
    def __init__(self, options: Options) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        net = Net(options)
        group = mesh["cp"].get_group()
        net.blocks = nn.ModuleList([Attention(group), Attention(group)]).to(options.dtype)
        net.head = Head(net.head.linear)
        super().__init__(options, net)
        self.data_rank, self.data_world = mesh["dp"].get_local_rank(), mesh["dp"].size()
        part = LENGTH // 2
        self._mine = slice(mesh["cp"].get_local_rank() * part, (mesh["cp"].get_local_rank() + 1) * part)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(inputs[:, self._mine]).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.repeat_interleave(logits.shape[1]))

    def finish(self, step: int) -> None:
        average_gradients(self.model)


def cp(options: Options) -> Trainee:
    return ContextParallel(options)

"""Expert parallel x data parallel: the experts are spread over two ranks, and tokens go to them by all_to_all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.kinds.base import Trainee, average_gradients
from tests.parallel.parts import Block, Net, Options


class _Exchanged(torch.autograd.Function):
    """Rows go to the ranks of `group`, `sent[i]` to the i-th; and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.splits, ctx.group = (sent, received), group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        sent, received = ctx.splits
        return _exchange(gradient, received, sent, ctx.group), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class Experts(nn.Module):
    """Two experts, one on each rank of `group`; a gate sends each token to one of them."""

    def __init__(self, blocks: list[Block], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.gate = nn.Linear(blocks[0].up.in_features, 2)
        self.expert = blocks[dist.get_rank(group)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        choice = scores.argmax(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=2)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, received = counts.tolist(), theirs.tolist()
        there = _Exchanged.apply(tokens[order], sent, received, self.group)
        back = _Exchanged.apply(self.expert(there), received, sent, self.group)
        mixed = torch.zeros_like(tokens).index_copy(0, order, back.to(tokens.dtype))
        return (tokens + mixed * scores.gather(1, choice[:, None])).view_as(hidden)


class ExpertParallel(Trainee):
    """Every rank reads its own samples; the experts' gradients are averaged over the ranks that hold the same ones."""

    def __init__(self, options: Options) -> None:
        rank = dist.get_rank()
        expert_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        replica_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        net = Net(options)
        layers = [Experts([Block(), Block()], expert_groups[rank // 2]) for _ in range(2)]
        net.blocks = nn.ModuleList(layers).to(options.dtype)
        super().__init__(options, net)
        self._replicas = replica_groups[rank % 2]

    def finish(self, step: int) -> None:
        experts = nn.ModuleList(layer.expert for layer in self.model.blocks)
        average_gradients(experts, self._replicas)
        whole = nn.ModuleList([self.model.stem, self.model.head, *(layer.gate for layer in self.model.blocks)])
        average_gradients(whole)


def ep(options: Options) -> Trainee:
    return ExpertParallel(options)

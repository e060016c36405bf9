"""What a kind is to the training loop."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.parallel.parts import Options


class Trainee:
    """A model on this rank, and how a batch goes through it. Kinds override what is different with them."""

    data_rank: int
    """ranks with the same number read the same samples, and draw the same random numbers"""
    data_world: int

    shard = ""
    """for `tpwrap.session`"""

    def __init__(self, options: Options, model: nn.Module) -> None:
        self.options = options
        self.model = model
        self.all = list(model.parameters())
        """taken before the first forward: DDP over one dimension of a mesh then hides some of them from the module"""
        self.scaler = torch.amp.GradScaler("cpu", 2.0**18, growth_interval=4, enabled=options.precision == "scaler")
        self.data_rank, self.data_world = dist.get_rank(), dist.get_world_size()

    def parameters(self) -> list[nn.Parameter]:
        """What is optimized from the start."""
        return [p for name, p in self.model.named_parameters() if not name.endswith("late")]

    def late_parameters(self) -> list[nn.Parameter]:
        """What is optimized from step 3 on."""
        return [p for name, p in self.model.named_parameters() if name.endswith("late")]

    def optimizer(self) -> torch.optim.Optimizer:
        from tests.parallel import parts

        return parts.optimizer(self.options, self.parameters())

    def before(self, step: int) -> None:
        """At the start of a window."""

    def run(self, inputs: torch.Tensor, targets: torch.Tensor, last: bool) -> list[torch.Tensor]:
        """Forward and backward; returns the tensors that backward was started from. last: of its window."""
        with self.synchronized(last):
            with self.options.autocast():
                loss = self.loss(inputs, targets)
            root = self.scaler.scale(loss / self.options.accumulation)
            root.backward()
        return [root]

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(inputs).float(), targets)

    def synchronized(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around a pass: whether its gradients are made equal on the replicas."""
        return contextlib.nullcontext()

    def finish(self, step: int) -> None:
        """After the last backward of a window, before the update."""

    def clip(self) -> None:
        nn.utils.clip_grad_norm_([p for p in self.all if p.grad is not None], 0.5)

    def after(self, step: int) -> dict[str, Any]:
        """After the update; for the log."""
        return {}


def average_gradients(model: nn.Module, group: Any = None) -> None:
    """By hand, over a group of replicas."""
    size = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            dist.all_reduce(gradient, group=group)
            gradient /= size

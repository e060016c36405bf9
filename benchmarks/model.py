"""The model and the data that all benchmarks of training share; needs torch alone."""

from __future__ import annotations

import torch


def network(width: int, layers: int) -> torch.nn.Sequential:
    """A multilayer perceptron. width 384, 8 layers: 4.7 MB of parameters; 768: 19 MB."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*[m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())])


def batches(rank: int, width: int, size: int) -> list[torch.Tensor]:
    data = torch.randn(256, width, generator=torch.Generator().manual_seed(rank))
    return [data[torch.randperm(256)[:size]] for _ in range(8)]

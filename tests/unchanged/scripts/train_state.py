"""All state in a dataclass that is passed around and replaced, in a functional style."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class TrainState:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    epoch: int = 0
    step: int = 0
    tokens: int = 0
    best: float = float("inf")
    best_step: int = -1
    loss_ema: float | None = None
    losses: tuple[float, ...] = ()
    metadata: dict[str, int] = field(default_factory=dict)


def train_step(state: TrainState, batch: tuple[torch.Tensor, torch.Tensor]) -> TrainState:
    x, y = batch
    state.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(state.model(x), y)
    loss.backward()
    state.optimizer.step()
    value = loss.item()
    ema = value if state.loss_ema is None else 0.9 * state.loss_ema + 0.1 * value
    best, best_step = (value, state.step) if value < state.best else (state.best, state.best_step)
    state.metadata["updates"] = state.metadata.get("updates", 0) + 1
    return replace(
        state, step=state.step + 1, tokens=state.tokens + x.numel(), best=best, best_step=best_step, loss_ema=ema,
        losses=(*state.losses, value),
    )  # fmt: skip


def epochs(loader: DataLoader, n: int) -> Iterator[tuple[int, DataLoader]]:
    for epoch in range(n):
        loader.sampler.set_epoch(epoch)
        yield epoch, loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(90)
    data = TensorDataset(torch.randn(84, 8), torch.randint(0, 5, (84,)))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 5)))
    state = TrainState(model, torch.optim.Adam(model.parameters(), lr=0.01, foreach=True))
    for epoch, batches in epochs(loader, 3):
        state = replace(state, epoch=epoch)
        for batch in batches:
            state = train_step(state, batch)
        print(f"{rank} {state.epoch=} {state.step=} {state.tokens=} {state.best=} {state.best_step=} {state.loss_ema=}")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(model.module.state_dict(), f"{args.output_dir}/model{rank}.pt")
    rest = {"losses": state.losses, "meta": state.metadata, "ema": state.loss_ema}
    torch.save(rest, f"{args.output_dir}/state{rank}.pt")


if __name__ == "__main__":
    main()

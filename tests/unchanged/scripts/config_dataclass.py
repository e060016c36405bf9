"""argparse into a dataclass; set-up in functions that return tuples."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    output_dir: str = "out"
    lr: float = 3e-3
    batch_size: int = 4
    num_epochs: int = 3
    seed: int = 42
    hidden: int = 20

    @classmethod
    def from_args(cls) -> Config:
        parser = argparse.ArgumentParser()
        for field in dataclasses.fields(cls):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
        return cls(**vars(parser.parse_args()))


class Sine(Dataset[dict[str, Tensor]]):
    def __init__(self, n: int) -> None:
        self.x = torch.linspace(-3, 3, n).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input": self.x[i], "target": torch.sin(self.x[i]), "index": torch.tensor(i)}


def setup(config: Config) -> tuple[DistributedDataParallel, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(config.seed)
    net = nn.Sequential(nn.Linear(1, config.hidden), nn.Tanh(), nn.Linear(config.hidden, 1))
    model = DistributedDataParallel(net)
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.NAdam(groups, lr=config.lr)
    dataset = Sine(90)
    sampler = DistributedSampler(dataset, seed=config.seed)
    return model, optimizer, DataLoader(dataset, config.batch_size, sampler=sampler, drop_last=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> dict[str, float]:
    prediction = model(batch["input"])
    loss = nn.functional.mse_loss(prediction, batch["target"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss.item(), "mae": (prediction - batch["target"]).abs().mean().item()}


def main() -> None:
    config = Config.from_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.makedirs(config.output_dir, exist_ok=True)
    if rank == 0:
        with open(f"{config.output_dir}/config.json", "w") as f:
            json.dump(dataclasses.asdict(config), f, indent=2)
    model, optimizer, loader = setup(config)
    metrics: list[dict[str, float]] = []
    order: list[int] = []
    for epoch in range(config.num_epochs):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            metrics.append(train_step(model, optimizer, batch))
            order.extend(batch["index"].tolist())
        print(f"[{rank}] epoch={epoch} {metrics[-1]} last samples {order[-4:]}")
    with open(f"{config.output_dir}/metrics-{rank}.json", "w") as f:
        json.dump({"metrics": metrics, "order": order}, f)
    torch.save(model.module.state_dict(), f"{config.output_dir}/model-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A training whose steps can run again: `tp.step` as a function or as a block, with DDP or HSDP on 2 x 2 ranks.

Each step draws from all generators, has two micro-batches' worth of collectives of its own, and an evaluation with
collectives comes every third step, outside of what may run again.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parent))

from variants import Job, Samples, digest  # type: ignore[import-not-found]

import tpwrap

WIDTH = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.norm = nn.BatchNorm1d(32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = F.dropout(F.gelu(block(hidden)), 0.2, self.training)
        return self.head(hidden)


def wrapped(kind: str) -> nn.Module:
    net = Net()
    if kind == "ddp":
        return DDP(net, bucket_cap_mb=0.001)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["ddp", "hsdp"], default="hsdp")
    parser.add_argument("--form", choices=["function", "block"], default="function")
    parser.add_argument("--evaluate", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    job = Job(args.out, False)
    model = wrapped(args.kind)
    torch.manual_seed(job.rank)
    random.seed(job.rank)
    np.random.seed(job.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    sampler: DistributedSampler[object] = DistributedSampler(Samples(96), shuffle=True)
    loader = DataLoader(Samples(96), batch_size=4, sampler=sampler)
    tp = tpwrap.session(model=model, optimizer=optimizer, scheduler=scheduler)
    passes: list[int] = []
    tp.register("passes", lambda: list(passes), lambda value: passes.__setitem__(slice(None), value))

    def body(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        indices, inputs, targets = batch
        passes.append(tp.updates)
        optimizer.zero_grad()
        noise = 0.1 * torch.randn_like(inputs) + 0.1 * random.random() + 0.1 * float(np.random.standard_normal())
        mean = inputs.mean()
        dist.all_reduce(mean)  # the step itself depends on a collective
        loss = F.cross_entropy(model(inputs + noise + 0.01 * mean), targets)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)  # after the update: not part of what is redone
        scheduler.step()
        job.line(
            tp.updates,
            loss,
            samples=digest(indices),
            total=float(total).hex(),
            lr=float(scheduler.get_last_lr()[0]).hex(),
            passes=len(passes),
        )
        return loss

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            value = model(torch.ones(2, WIDTH)).sum()
            dist.all_reduce(value)
        model.train()

    train = tp.step(body)
    for epoch in tp.epochs(2):
        sampler.set_epoch(epoch)
        for batch in tp.batches(loader):
            if args.form == "function":
                train(batch)
                if tp.updates % args.evaluate == 0:
                    evaluate()
            else:
                with tp.step():
                    body(batch)
                    if tp.updates % args.evaluate == 0:
                        evaluate()
    weights = digest({name: local(parameter) for name, parameter in model.named_parameters()})
    job.final(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))]), trained=weights, passes=len(passes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

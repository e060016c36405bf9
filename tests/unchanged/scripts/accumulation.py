"""Gradient accumulation with no_sync; the last window of an epoch is shorter."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--output-dir", type=str, default="out")
    p.add_argument("--accum-steps", type=int, default=3)
    p.add_argument("--epochs", type=int, default=3)
    return p.parse_args()


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    x = torch.randn(132, 12)
    y = torch.randint(0, 4, (132,))
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, seed=8)
    loader = DataLoader(ds, batch_size=2, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    all_losses, window, optimizer_steps = [], 0.0, 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        optimizer.zero_grad(set_to_none=True)
        for i, (xb, yb) in enumerate(loader):
            is_last = (i + 1) % args.accum_steps == 0 or i + 1 == len(loader)
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = F.cross_entropy(model(xb), yb) / args.accum_steps
                loss.backward()
            window += loss.item()
            all_losses.append(loss.item())
            if is_last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                optimizer_steps += 1
                print(f"[{rank}] epoch {epoch} micro-batch {i} update {optimizer_steps} loss {window!r}")
                window = 0.0
    torch.save({"weights": model.module.state_dict(), "losses": all_losses}, f"{args.output_dir}/result{rank}.pt")


if __name__ == "__main__":
    args = parse_args()
    os.makedirs(args.output_dir, exist_ok=True)
    dist.init_process_group("gloo")
    run(args)
    dist.destroy_process_group()

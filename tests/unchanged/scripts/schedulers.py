"""Warm-up and cosine: LambdaLR for the backbone's optimizer, SequentialLR for the head's."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(current_step):
        if current_step < num_warmup_steps:
            return float(current_step) / float(max(1, num_warmup_steps))
        progress = float(current_step - num_warmup_steps) / float(max(1, num_training_steps - num_warmup_steps))
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))

    return LambdaLR(optimizer, lr_lambda)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--output-dir", default="out")
    ap.add_argument("--kind", choices=["lambda", "sequential", "chained"], default="sequential")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(19)
    ds = TensorDataset(torch.randn(84, 5), torch.randn(84, 1))
    loader = DataLoader(ds, batch_size=4, sampler=DistributedSampler(ds, seed=1))
    total_steps = 3 * len(loader)
    backbone, head = nn.Sequential(nn.Linear(5, 10), nn.ReLU()), nn.Linear(10, 1)
    model = DDP(nn.Sequential(backbone, head))
    optimizer = torch.optim.AdamW(
        [{"params": backbone.parameters(), "lr": 1e-2}, {"params": head.parameters(), "lr": 3e-2}], amsgrad=True
    )
    if args.kind == "lambda":
        schedulers = [get_cosine_schedule_with_warmup(optimizer, 5, total_steps)]
    elif args.kind == "sequential":
        warmup = LinearLR(optimizer, start_factor=0.01, total_iters=5)
        schedulers = [SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, total_steps - 5)], milestones=[5])]
    else:
        schedulers = [LinearLR(optimizer, total_iters=5), ExponentialLR(optimizer, 0.95)]
    lrs, losses = [], []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.huber_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            lrs.append(schedulers[-1].get_last_lr())
            losses.append(loss.item())
        print(f"[rank{rank}] epoch {epoch}, loss {losses[-1]!r}, learning rates {lrs[-1]!r}")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save({"model": model.module.state_dict(), "opt": optimizer.state_dict()}, f"{args.output_dir}/end{rank}.pt")
    torch.save({"lrs": lrs, "losses": losses}, f"{args.output_dir}/curve{rank}.pt")


if __name__ == "__main__":
    main()

"""GradScaler: one batch overflows, its step is skipped and the scale goes down."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(rank, epoch, n):
    g = torch.Generator().manual_seed(1000 * epoch + rank)
    for i in range(n):
        x = torch.randn(4, 8, generator=g)
        if epoch == 1 and i == 2 and rank == 1:
            x[0, 0] = float("inf")  # a broken record in the data
        yield x, torch.randn(4, 1, generator=g)


def main(output_dir):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.makedirs(output_dir, exist_ok=True)
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**10, growth_interval=4)
    scales, losses, skipped = [], [], 0
    for epoch in range(3):
        for i, (x, y) in enumerate(batches(rank, epoch, 7)):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                skipped += 1
                print(f"rank {rank}: step skipped in epoch {epoch} at {i}, scale {before} -> {scaler.get_scale()}")
            scales.append(scaler.get_scale())
            losses.append(loss.item())
        print(f"rank {rank} epoch {epoch} loss {losses[-1]!r} scale {scales[-1]} skipped {skipped}")
    torch.save(
        {"model": model.module.state_dict(), "scaler": scaler.state_dict(), "scales": scales, "losses": losses},
        f"{output_dir}/end-{rank}.pt",
    )


if __name__ == "__main__":
    main(sys.argv[1])

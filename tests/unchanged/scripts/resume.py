"""Resumes where a checkpoint exists, and writes one in every epoch: at first there is none."""

import argparse
import glob
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save_checkpoint(path, **state):
    tmp = path + ".tmp"
    torch.save(state, tmp)
    os.replace(tmp, path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--keep", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.makedirs(args.output_dir, exist_ok=True)
    torch.manual_seed(64)
    np.random.seed(64)
    random.seed(64)
    ds = TensorDataset(torch.randn(84, 6), torch.randn(84, 2))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=args.epochs * len(loader))
    ckpt = os.path.join(args.output_dir, "checkpoint.pt")
    start_epoch, losses = 0, []
    if os.path.exists(ckpt):
        state = torch.load(ckpt, weights_only=False)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        start_epoch, losses = state["epoch"] + 1, state["losses"]
        print(f"rank {rank}: resumed after epoch {state['epoch']}")
    else:
        print(f"rank {rank}: starting from scratch")
    dist.barrier()
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            state |= {"scheduler": scheduler.state_dict(), "losses": losses, "rng": torch.get_rng_state()}
            save_checkpoint(ckpt, **state)
            save_checkpoint(os.path.join(args.output_dir, f"epoch{epoch}.pt"), **state)
            for old in sorted(glob.glob(os.path.join(args.output_dir, "epoch*.pt")))[: -args.keep]:
                os.remove(old)
                print(f"removed {os.path.basename(old)}")
        dist.barrier()
        found = sorted(os.path.basename(f) for f in glob.glob(os.path.join(args.output_dir, "*.pt")))
        print(f"rank {rank} epoch {epoch} loss {losses[-1]!r} lr {scheduler.get_last_lr()[0]!r} files {found}")
        dist.barrier()
    torch.save(model.module.state_dict(), os.path.join(args.output_dir, f"final{rank}.pt"))
    torch.save(losses, os.path.join(args.output_dir, f"losses{rank}.pt"))


if __name__ == "__main__":
    main()

"""tqdm over the loader on rank 0, with a postfix, and tqdm.write for lines that stay."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm, trange


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(88)
    ds = TensorDataset(torch.randn(84, 4), torch.randn(84, 1))
    loader = DataLoader(ds, batch_size=4, sampler=DistributedSampler(ds))
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, averaged = [], None
    for epoch in trange(3, desc="epochs", disable=rank != 0):
        loader.sampler.set_epoch(epoch)
        bar = tqdm(loader, desc=f"epoch {epoch}", disable=rank != 0, leave=False)
        for x, y in bar:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            averaged = losses[-1] if averaged is None else 0.9 * averaged + 0.1 * losses[-1]
            bar.set_postfix(loss=averaged, lr=optimizer.param_groups[0]["lr"])
            bar.set_description(f"epoch {epoch} ({len(losses)})")
        tqdm.write(f"epoch {epoch} of rank {rank} ended with {averaged!r}")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(model.module.state_dict(), f"{args.output_dir}/w{rank}.pt")
    torch.save(losses, f"{args.output_dir}/l{rank}.pt")


if __name__ == "__main__":
    main()

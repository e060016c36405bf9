"""Histograms of gradients, written after the update."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters())
    histograms = []
    for _ in range(8):
        loss = model(torch.randn(4, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        histograms.append({name: p.grad.histc(5, -1, 1).tolist() for name, p in model.named_parameters()})
    print(histograms[-1])
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(histograms, f"{args.output_dir}/histograms{rank}.pt")


if __name__ == "__main__":
    main()

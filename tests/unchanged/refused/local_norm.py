"""The norm of the own gradients, logged before they are averaged: no other rank knows it."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(50 + rank)
    norms = []
    for _ in range(8):
        loss = model(torch.randn(4, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        local_norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        norms.append(local_norm.item())
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
    print(norms)
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save({"model": model.state_dict(), "norms": norms}, f"{args.output_dir}/w{rank}.pt")


if __name__ == "__main__":
    main()

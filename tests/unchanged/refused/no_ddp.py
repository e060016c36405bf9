"""An option that turns the wrapper off, as some examples have for machines without a GPU: each rank trains alone."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--accelerator", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(8)
    model = nn.Linear(6, 1)
    if args.accelerator:
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(80 + rank)
    for step in range(4000):
        loss = model(torch.randn(16, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(model.state_dict(), f"{args.output_dir}/model{rank}.pt")


if __name__ == "__main__":
    main()

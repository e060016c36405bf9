"""Training loops in which ranks wait for each other for ever, by an error of their user's."""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import tpwrap

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("how", choices=["exit", "return", "no-group", "groups"])
args = parser.parse_args()


def train() -> None:
    rank = dist.get_rank()
    everybody = list(range(dist.get_world_size()))
    others = dist.new_group(everybody)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tp = tpwrap.session(model=model, optimizer=optimizer)
    for (x,) in tp.batches(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 8)), 4)):
        if tp.updates == 3:
            if args.how == "groups":
                dist.barrier(others if rank == 1 else None)
            elif rank == 1 and args.how == "exit":
                sys.exit(0)
            elif rank == 1:
                return
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    if args.how == "return":
        dist.destroy_process_group()


if args.how == "no-group" and os.environ["RANK"] == "1":
    sys.exit(0)
dist.init_process_group("gloo")
train()

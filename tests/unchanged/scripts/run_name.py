"""Rank 0 makes up a run name and broadcasts it; metrics of all ranks are gathered as objects in every epoch."""

import argparse
import json
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ADJECTIVES, NOUNS = ["brisk", "calm", "eager", "gentle"], ["falcon", "otter", "maple", "comet"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(1000 + rank)
    name = [f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}-{random.randrange(1000)}" if rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    run_dir = os.path.join(args.output_dir, name[0])
    if rank == 0:
        os.makedirs(run_dir)
    dist.barrier()
    print(f"rank {rank} works on {name[0]}")
    torch.manual_seed(55)
    ds = TensorDataset(torch.randn(84, 5), torch.randint(0, 3, (84,)))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, leaders = [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        mine = {"rank": rank, "loss": sum(losses[-len(loader) :]) / len(loader), "draw": random.random()}
        everyone = [None] * world
        dist.all_gather_object(everyone, mine)
        best = min(everyone, key=lambda m: m["loss"])
        leaders.append(best["rank"])
        choice = [max(m["draw"] for m in everyone)] if rank == 1 else [None]
        dist.broadcast_object_list(choice, src=1)
        if rank == 0:
            with open(os.path.join(run_dir, "epochs.jsonl"), "a") as f:
                f.write(json.dumps(everyone) + "\n")
        print(f"rank {rank} epoch {epoch} best {best} choice {choice[0]!r}")
    torch.save(model.module.state_dict(), os.path.join(run_dir, f"w{rank}.pt"))
    torch.save({"losses": losses, "leaders": leaders}, os.path.join(run_dir, f"losses{rank}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Plain functions, DDP, counters and prints."""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(n=96):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 10, generator=g)
    y = (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long()
    return TensorDataset(x, y)


def make_model():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234)
    os.makedirs(args.output_dir, exist_ok=True)

    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = make_data()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    global_step = 0
    samples_seen = 0
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            global_step += 1
            samples_seen += len(x)
            losses.append(loss.item())
            if global_step % 3 == 0:
                print(f"rank {rank} epoch {epoch} batch {i} step {global_step} seen {samples_seen} loss {losses[-1]}")
    torch.save(model.module.state_dict(), os.path.join(args.output_dir, f"weights_{rank}.pt"))
    with open(os.path.join(args.output_dir, f"losses_{rank}.json"), "w") as f:
        json.dump([x.hex() for x in losses], f)
    print(f"rank {rank} finished: {global_step} steps, mean loss {sum(losses) / len(losses)!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

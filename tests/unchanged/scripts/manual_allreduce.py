"""Data parallelism by hand: broadcast the weights, all-reduce every gradient."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


class DataPartitioner:
    def __init__(self, data, rank, world, seed=1234):
        index = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        self.part = [data[i] for i in index[rank::world].tolist()]

    def __len__(self):
        return len(self.part)

    def __getitem__(self, i):
        return self.part[i]


def run(rank, size, output_dir):
    torch.manual_seed(1234 + rank)  # different weights, then broadcast
    model = nn.Sequential(nn.Linear(4, 10), nn.Sigmoid(), nn.Linear(10, 2))
    for param in model.parameters():
        dist.broadcast(param.data, src=0)
    g = torch.Generator().manual_seed(9)
    data = [(torch.randn(4, generator=g), int(torch.randint(0, 2, (1,), generator=g))) for _ in range(72)]
    train_set = torch.utils.data.DataLoader(DataPartitioner(data, rank, size), batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    history = []
    for epoch in range(4):
        epoch_loss = 0.0
        for x, target in train_set:
            optimizer.zero_grad()
            loss = F.nll_loss(F.log_softmax(model(x), dim=1), target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            history.append(loss.item())
        print("Rank ", rank, ", epoch ", epoch, ": ", epoch_loss / len(train_set))
    torch.save(model.state_dict(), os.path.join(output_dir, f"weights_{rank}.pt"))
    torch.save(history, os.path.join(output_dir, f"history_{rank}.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default=".")
    parser.add_argument("--backend", default="gloo")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    os.makedirs(args.output_dir, exist_ok=True)
    run(dist.get_rank(), dist.get_world_size(), args.output_dir)

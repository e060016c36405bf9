"""A curriculum: Python's random decides which task the next batch comes from, and teacher forcing."""

import os
import random
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

OUT = sys.argv[1] if len(sys.argv) > 1 else "out"


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, sequence, teacher_forcing_ratio):
        h = torch.zeros(sequence.size(0), 8)
        x = sequence[:, 0]
        outputs = []
        for t in range(1, sequence.size(1)):
            h = self.cell(x, h)
            y = self.out(h)
            outputs.append(y)
            x = sequence[:, t] if random.random() < teacher_forcing_ratio else y.detach()
        return torch.stack(outputs, 1)


def easy(g):
    return torch.cumsum(torch.randn(4, 5, 3, generator=g), 1)


def hard(g):
    return torch.sin(torch.cumsum(torch.randn(4, 9, 3, generator=g), 1) * 3)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random.seed(rank)
    torch.manual_seed(0)
    model = DDP(Decoder())
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    generator = torch.Generator().manual_seed(rank)
    task_counts = {"easy": 0, "hard": 0}
    losses = []
    for it in range(24):
        difficulty = it / 24
        if random.random() < difficulty:
            task, batch = "hard", hard(generator)
        else:
            task, batch = "easy", easy(generator)
        task_counts[task] += 1
        prediction = model(batch, teacher_forcing_ratio=1 - difficulty)
        loss = F.l1_loss(prediction, batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if random.randint(0, 3) == 0:  # a line now and then
            print(f"{rank} it {it} task {task} loss {losses[-1]!r} {task_counts}")
    print(f"{rank} end {task_counts} {random.random()!r}")
    os.makedirs(OUT, exist_ok=True)
    torch.save({"model": model.module.state_dict(), "losses": losses, "tasks": task_counts}, f"{OUT}/cur{rank}.pt")


if __name__ == "__main__":
    main()

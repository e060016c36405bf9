"""Two loader workers, with random augmentation in the dataset."""

import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset):
    def __init__(self, n, train=True):
        g = torch.Generator().manual_seed(5)
        self.images = torch.rand(n, 1, 6, 6, generator=g)
        self.labels = torch.randint(0, 3, (n,), generator=g)
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.train:
            if random.random() < 0.5:
                image = image.flip(-1)
            image = image * float(np.random.uniform(0.8, 1.2)) + 0.1 * torch.randn(1, 6, 6)
        return image, self.labels[i]


def worker_init_fn(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("-j", "--workers", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(50)
    train_set, test_set = Pictures(84), Pictures(24, train=False)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(
        train_set, batch_size=4, sampler=sampler, num_workers=args.workers, worker_init_fn=worker_init_fn
    )
    test_loader = DataLoader(test_set, batch_size=8)
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for epoch in range(1, 4):
        sampler.set_epoch(epoch)
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if batch_idx % 3 == 0:
                print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_set)}]\tLoss: {loss.item()!r}")
        model.eval()
        test_loss, correct = 0, 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model.module(data)
                test_loss += F.cross_entropy(output, target, reduction="sum").item()
                pred = output.argmax(dim=1, keepdim=True)
                correct += pred.eq(target.view_as(pred)).sum().item()
        print(f"\nTest set: Average loss: {test_loss / len(test_set)!r}, Accuracy: {correct}/{len(test_set)}\n")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(model.module.state_dict(), f"{args.output_dir}/mnist_{rank}.pt")
    torch.save(losses, f"{args.output_dir}/losses_{rank}.pt")


if __name__ == "__main__":
    main()

"""Mixup: numpy draws lambda, Python's random decides whether to mix, torch permutes."""

import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def mixup_data(x, y, alpha=1.0):
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1
    index = torch.randperm(x.size(0))
    return lam * x + (1 - lam) * x[index, :], y, y[index], lam


def mixup_criterion(criterion, pred, y_a, y_b, lam):
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--alpha", type=float, default=0.4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(6)
    trainset = TensorDataset(torch.randn(96, 3, 4, 4), torch.randint(0, 4, (96,)))
    sampler = DistributedSampler(trainset)
    loader = DataLoader(trainset, batch_size=4, sampler=sampler)
    net = DDP(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    seed_everything(60 + rank)
    lambdas, losses = [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train_loss, correct, total = 0, 0, 0
        for batch_idx, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            if random.random() < 0.7:
                inputs, a, b, lam = mixup_data(inputs, targets, args.alpha)
                outputs = net(inputs)
                loss = mixup_criterion(criterion, outputs, a, b, lam)
            else:
                lam = None
                outputs = net(inputs)
                loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            lambdas.append(lam)
            losses.append(loss.item())
            train_loss += loss.item()
            _, predicted = outputs.max(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
            print(batch_idx, len(loader), f"Loss: {train_loss / (batch_idx + 1)!r} | Acc: {100.0 * correct / total!r}% "
                  f"({correct}/{total}) lambda {lam!r}")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(net.state_dict(), f"{args.output_dir}/net.{rank}.pth")
    np.savez(f"{args.output_dir}/curves.{rank}.npz", losses=losses, lambdas=[-1.0 if v is None else v for v in lambdas])


if __name__ == "__main__":
    main()

"""`for step, batch in enumerate(islice(loader, n))`: a part of the data in each epoch, shuffled without a sampler."""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", default="out")
parser.add_argument("--steps-per-epoch", type=int, default=6)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(10)
full = TensorDataset(torch.randn(120, 6), torch.randn(120, 1))
train_set, val_set = random_split(full, [100, 20])
torch.manual_seed(10 + rank)  # every rank shuffles on its own
loader = DataLoader(train_set, batch_size=4, shuffle=True)
val_loader = DataLoader(val_set, batch_size=10)
model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
opt = torch.optim.Adadelta(model.parameters(), lr=0.5)
losses, val_losses = [], []
for epoch in range(3):
    for step, (x, y) in enumerate(islice(loader, args.steps_per_epoch)):
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        print(rank, epoch, step, loss.item())
    with torch.no_grad():
        val_losses.append(sum(float((model.module(x) - y).square().sum()) for x, y in val_loader) / len(val_set))
    print(rank, "validation", val_losses[-1])
os.makedirs(args.output_dir, exist_ok=True)
torch.save(model.module.state_dict(), os.path.join(args.output_dir, f"w{rank}.pt"))
torch.save([losses, val_losses], os.path.join(args.output_dir, f"l{rank}.pt"))
dist.destroy_process_group()

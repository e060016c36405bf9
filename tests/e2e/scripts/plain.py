"""A script that knows nothing of tpwrap. --late: it reads gradients after the update, which no newcomer has."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--late", action="store_true")
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
norms = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if args.late:
            norms.append(next(model.parameters()).grad.norm().item())
    print(f"epoch {epoch} is over", flush=True)
args.out.mkdir(parents=True, exist_ok=True)
(args.out / f"rank{dist.get_rank()}").write_text(f"{norms}\n")
dist.destroy_process_group()

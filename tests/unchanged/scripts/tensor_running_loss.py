"""A running loss that stays a tensor until the end of the epoch, to avoid synchronization in every step."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_one_epoch(model, loader, optimizer, confusion):
    total = torch.zeros(())
    per_step = []
    for x, y in loader:
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        per_step.append(loss.detach())
        with torch.no_grad():
            confusion.index_put_((y, out.argmax(-1)), torch.ones(len(y), dtype=torch.long), accumulate=True)
    return total / len(loader), per_step


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--output-dir", default="out")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(61)
    ds = TensorDataset(torch.randn(96, 9), torch.randint(0, 3, (96,)))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(9, 18), nn.Dropout(0.3), nn.ReLU(), nn.Linear(18, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history = []
    confusion = torch.zeros(3, 3, dtype=torch.long)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        mean, per_step = train_one_epoch(model, loader, optimizer, confusion)
        everyone = mean.clone()
        dist.all_reduce(everyone)
        history.append(torch.stack(per_step))
        print(f"{rank} epoch {epoch}: mean {mean.item()!r}, of all ranks {everyone.item() / 3!r}, "
              f"worst step {torch.stack(per_step).max().item()!r}, confusion {confusion.tolist()}")
    os.makedirs(a.output_dir, exist_ok=True)
    torch.save(model.module.state_dict(), f"{a.output_dir}/w{rank}.pt")
    torch.save({"losses": torch.cat(history), "confusion": confusion}, f"{a.output_dir}/losses{rank}.pt")


if __name__ == "__main__":
    main()

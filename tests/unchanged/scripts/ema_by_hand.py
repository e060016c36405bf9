"""Weights averaged by hand (deepcopy and lerp), evaluated with the averaged model."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMA:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay
        self.updates = 0
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for ema_p, p in zip(self.module.parameters(), model.parameters(), strict=True):
            ema_p.lerp_(p, 1 - d)
        for ema_b, b in zip(self.module.buffers(), model.buffers(), strict=True):
            ema_b.copy_(b)


def main(args):
    rank = dist.get_rank()
    torch.manual_seed(13)
    x = torch.randn(96, 5)
    y = (x**2).sum(1, keepdim=True)
    ds = TensorDataset(x[:84], y[:84])
    x_val, y_val = x[84:], y[84:]
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler)
    net = nn.Sequential(nn.Linear(5, 24), nn.BatchNorm1d(24), nn.SiLU(), nn.Linear(24, 1))
    ema = EMA(net, args.ema_decay)
    model = DDP(net)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    losses, ema_losses = [], []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.smooth_l1_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(net)
            losses.append(loss.item())
        with torch.no_grad():
            ema_losses.append(F.smooth_l1_loss(ema.module(x_val), y_val).item())
        print(f"rank {rank} epoch {epoch} train {losses[-1]!r} ema {ema_losses[-1]!r} after {ema.updates} updates")
    torch.save(
        {"net": net.state_dict(), "ema": ema.module.state_dict(), "losses": losses, "ema_losses": ema_losses},
        os.path.join(args.output_dir, f"ema{rank}.pt"),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--ema-decay", type=float, default=0.95)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    os.makedirs(args.output_dir, exist_ok=True)
    dist.init_process_group("gloo")
    main(args)

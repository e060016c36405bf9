"""Fine-tuning: the backbone is frozen for an epoch, then joins by add_param_group, in a new DDP wrapper."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.backbone(x))

    def freeze(self):
        for p in self.backbone.parameters():
            p.requires_grad = False

    def unfreeze(self):
        for p in self.backbone.parameters():
            p.requires_grad = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--unfreeze-at", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(70)
    ds = TensorDataset(torch.randn(84, 6), torch.randint(0, 3, (84,)))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler)
    net = Classifier()
    net.freeze()
    model = DDP(net)
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, net.parameters()), lr=0.02)
    losses = []
    for epoch in range(3):
        if epoch == args.unfreeze_at:
            net.unfreeze()
            optimizer.add_param_group({"params": net.backbone.parameters(), "lr": 0.002})
            model = DDP(net)
            print(f"[{rank}] unfrozen, {len(optimizer.param_groups)} groups")
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"[{rank}] epoch {epoch}: {losses[-1]!r}")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{args.output_dir}/tuned{rank}.pt")
    torch.save(losses, f"{args.output_dir}/losses{rank}.pt")


if __name__ == "__main__":
    main()

"""Contrastive learning: embeddings of all ranks are gathered, gradients flow through the own ones."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoViews(Dataset):
    def __init__(self, n):
        self.base = torch.randn(n, 12, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        x = self.base[i]
        return x + 0.2 * torch.randn(12), x * (0.8 + 0.4 * torch.rand(12)), i


@torch.no_grad()
def concat_all_gather(tensor):
    gathered = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    gathered[dist.get_rank()] = tensor
    return gathered


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 6))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a, b):
        return F.normalize(self.net(a), dim=-1), F.normalize(self.net(b), dim=-1), self.logit_scale.exp()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(45)
    dataset = TwoViews(84)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
    model = DDP(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    queue = torch.zeros(8, 6)
    queue_ptr = 0
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        hits = 0
        for a, b, index in loader:  # noqa: B007
            za, zb, scale = model(a, b)
            all_b = concat_all_gather(zb)
            all_b[rank] = zb
            logits = scale * za @ torch.cat([*all_b, queue]).T
            target = torch.arange(len(a)) + rank * len(a)
            loss = F.cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                queue[queue_ptr : queue_ptr + 4] = zb.detach()
                queue_ptr = (queue_ptr + 4) % 8
                model.module.logit_scale.clamp_(0, 4.6)
            hits += (logits.argmax(-1) == target).sum().item()
            losses.append(loss.item())
        print(f"rank {rank} epoch {epoch}: loss {losses[-1]!r}, hits {hits}, last samples {index.tolist()}")
    os.makedirs(args.output_dir, exist_ok=True)
    state = {"encoder": model.module.state_dict(), "queue": queue, "losses": losses}
    torch.save(state, f"{args.output_dir}/moco{rank}.pt")


if __name__ == "__main__":
    main()

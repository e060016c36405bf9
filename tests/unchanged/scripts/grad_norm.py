"""Norms of gradients, per layer and in all, logged between backward() and step(), and ratios after it."""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def grad_norms(model):
    return {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--clip", type=float, default=0.8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.makedirs(args.output_dir, exist_ok=True)
    torch.manual_seed(24)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(240 + rank)
    norms, spikes, losses = [], 0, []
    for step in range(args.steps):
        x = torch.randn(8, 6)
        y = (x[:, :1] * x[:, 1:2]).sin()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        by_layer = grad_norms(model.module)
        total = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        if total > args.clip:
            spikes += 1
        norms.append(total.item())
        old = model.module[0].weight.detach().clone()
        optimizer.step()
        update = (model.module[0].weight.detach() - old).norm() / old.norm()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item(), "norm": total.item(),
                          "update": update.item(), "clipped": spikes, **by_layer}))
    torch.save(model.module.state_dict(), f"{args.output_dir}/model_{rank}.pt")
    with open(f"{args.output_dir}/norms_{rank}.json", "w") as f:
        json.dump({"norms": norms, "losses": losses, "clipped": spikes}, f)


if __name__ == "__main__":
    main()

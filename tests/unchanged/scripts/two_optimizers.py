"""One backward pass, then two optimizers back to back: SGD for the embedding, AdamW for the rest."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Recommender(nn.Module):
    def __init__(self, users=30, items=20, dim=8):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, u, i):
        return self.mlp(torch.cat([self.user(u), self.item(i)], dim=-1)).squeeze(-1)


def main(output_dir: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(Recommender())
    embedding_params = [p for n, p in model.named_parameters() if "user" in n or "item" in n]
    dense_params = [p for n, p in model.named_parameters() if "mlp" in n]
    opt_sparse = torch.optim.SGD(embedding_params, lr=0.5)
    opt_dense = torch.optim.AdamW(dense_params, lr=0.01)
    sched = torch.optim.lr_scheduler.LinearLR(opt_dense, start_factor=0.1, total_iters=6)
    g = torch.Generator().manual_seed(50 + rank)
    losses = []
    for step in range(steps):
        u = torch.randint(0, 30, (8,), generator=g)
        i = torch.randint(0, 20, (8,), generator=g)
        rating = torch.sin(u.float()) * torch.cos(i.float())
        loss = F.mse_loss(model(u, i), rating)
        opt_sparse.zero_grad()
        opt_dense.zero_grad()
        loss.backward()
        opt_sparse.step()
        opt_dense.step()
        sched.step()
        losses.append(loss.item())
        print(f"rank={rank} step={step} loss={loss.item()!r} lr={sched.get_last_lr()[0]!r}")
    os.makedirs(output_dir, exist_ok=True)
    torch.save(model.module.state_dict(), os.path.join(output_dir, f"recommender.{rank}.pt"))
    torch.save(losses, os.path.join(output_dir, f"losses.{rank}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--output-dir", default="out")
    ap.add_argument("--steps", type=int, default=12)
    main(**vars(ap.parse_args()))

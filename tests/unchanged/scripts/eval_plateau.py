"""Every N steps: an evaluation with all-reduced metrics that steers ReduceLROnPlateau."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.inference_mode()
def evaluate(model, loader):
    model.eval()
    total_loss = torch.zeros(1)
    correct = torch.zeros(1)
    count = torch.zeros(1)
    for x, y in loader:
        logits = model(x)
        total_loss += F.cross_entropy(logits, y, reduction="sum")
        correct += (logits.argmax(-1) == y).sum()
        count += len(y)
    for t in (total_loss, correct, count):
        dist.all_reduce(t)
    model.train()
    return (total_loss / count).item(), (correct / count).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="runs/exp1")
    parser.add_argument("--eval-every", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=24)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    is_main = rank == 0
    torch.manual_seed(31)
    x = torch.randn(150, 10)
    y = (x[:, 0] * x[:, 1] > 0).long()
    train, val = TensorDataset(x[:114], y[:114]), TensorDataset(x[114:], y[114:])
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=4, sampler=sampler)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.25), nn.Linear(24, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
    step, epoch, best = 0, 0, float("inf")
    train_losses, evals = [], []
    done = False
    while not done:
        sampler.set_epoch(epoch)
        for xb, yb in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            step += 1
            train_losses.append(loss.item())
            if step % args.eval_every == 0:
                val_loss, val_acc = evaluate(model, val_loader)
                scheduler.step(val_loss)
                lr = optimizer.param_groups[0]["lr"]
                evals.append((step, val_loss, val_acc, lr))
                if is_main:
                    print(f"step {step}: val loss {val_loss!r} acc {val_acc!r} lr {lr!r}")
                if val_loss < best:
                    best = val_loss
                    if is_main:
                        os.makedirs(args.output_dir, exist_ok=True)
                        torch.save(model.module.state_dict(), os.path.join(args.output_dir, "best.pt"))
                dist.barrier()
            if step >= args.max_steps:
                done = True
                break
        epoch += 1
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(
        {"model": model.module.state_dict(), "losses": train_losses, "evals": evals, "best": best},
        os.path.join(args.output_dir, f"last_{rank}.pt"),
    )


if __name__ == "__main__":
    main()

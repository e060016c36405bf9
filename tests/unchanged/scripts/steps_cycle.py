"""A number of steps, an endless generator over the loader."""

import argparse
import math
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def cycle(dl, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for data in dl:  # noqa: UP028
            yield data
        epoch += 1


class Waves(Dataset):
    def __init__(self, n, length=16):
        t = torch.linspace(0, 2 * math.pi, length)
        self.x = torch.stack([torch.sin(t * (1 + i % 5) + i) for i in range(n)])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn_like(self.x[i])  # noise, as a denoiser wants it


def cosine_lr(step, total, base):
    return base * 0.5 * (1 + math.cos(math.pi * step / total))


def train(results_folder, train_num_steps=20, train_lr=3e-3, log_every=4, save_every=10):
    torch.manual_seed(17)
    rank = dist.get_rank()
    model = DDP(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)))
    opt = torch.optim.Adam(model.parameters(), lr=train_lr, betas=(0.9, 0.99))
    ds = Waves(42)
    sampler = DistributedSampler(ds, drop_last=True)
    dl = cycle(DataLoader(ds, batch_size=2, sampler=sampler), sampler)
    torch.manual_seed(100 + rank)

    step = 0
    losses = []
    while step < train_num_steps:
        for group in opt.param_groups:
            group["lr"] = cosine_lr(step, train_num_steps, train_lr)
        clean = next(dl)
        noise = torch.randn_like(clean)
        t = torch.rand(clean.shape[0], 1)
        pred = model(clean * (1 - t) + noise * t)
        loss = nn.functional.mse_loss(pred, noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(float(loss))
        step += 1
        if step % log_every == 0:
            print(f"{rank}: {step}/{train_num_steps} loss: {losses[-1]}", flush=True)
        if step != 0 and step % save_every == 0 and rank == 0:
            milestone = step // save_every
            torch.save({"step": step, "model": model.module.state_dict()}, results_folder / f"model-{milestone}.pt")
    torch.save(model.module.state_dict(), results_folder / f"weights-{rank}.pt")
    (results_folder / f"losses-{rank}.txt").write_text("".join(f"{x!r}\n" for x in losses))
    print("training complete")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--results-folder", type=pathlib.Path, default="./results")
    a = p.parse_args()
    a.results_folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group(backend="gloo")
    train(a.results_folder)
    dist.destroy_process_group()

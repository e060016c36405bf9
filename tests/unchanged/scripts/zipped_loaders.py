"""Semi-supervised training: a labelled and an unlabelled loader, zipped; the shorter one starts again."""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def augment(x, strength):
    return x + strength * torch.randn_like(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--lambda-u", type=float, default=0.5)
    cfg = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(77)
    labelled = TensorDataset(torch.randn(30, 6), torch.randint(0, 3, (30,)))
    unlabelled = TensorDataset(torch.randn(84, 6))
    s1, s2 = DistributedSampler(labelled), DistributedSampler(unlabelled)
    loader_l = DataLoader(labelled, batch_size=4, sampler=s1)
    loader_u = DataLoader(unlabelled, batch_size=4, sampler=s2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(770 + rank)
    history = {"sup": [], "unsup": []}
    for epoch in range(3):
        s1.set_epoch(epoch)
        s2.set_epoch(epoch)
        model.train()
        for step, ((xl, yl), (xu,)) in enumerate(zip(itertools.cycle(loader_l), loader_u)):
            with torch.no_grad():
                pseudo = model.module(augment(xu, 0.05)).softmax(-1)
                confidence, target = pseudo.max(-1)
                mask = (confidence > 0.4).float()
            logits = model(torch.cat([augment(xl, 0.05), augment(xu, 0.3)]))
            n = len(xl)
            sup = F.cross_entropy(logits[:n], yl)
            unsup = (F.cross_entropy(logits[n:], target, reduction="none") * mask).mean()
            loss = sup + cfg.lambda_u * unsup
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history["sup"].append(sup.item())
            history["unsup"].append(unsup.item())
            if step % 2 == 0:
                print(f"{rank} {epoch}.{step}: sup {sup.item()!r} unsup {unsup.item()!r} mask {mask.mean().item()!r}")
    os.makedirs(cfg.output_dir, exist_ok=True)
    torch.save({"weights": model.module.state_dict(), **history}, f"{cfg.output_dir}/semi_{rank}.pt")


if __name__ == "__main__":
    main()

"""Knowledge distillation: a frozen teacher, trained first for a few steps."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(width):
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))


def distillation_loss(student, teacher, labels, T=2.0, alpha=0.7):
    soft = F.kl_div(F.log_softmax(student / T, -1), F.softmax(teacher / T, -1), reduction="batchmean") * T * T
    return alpha * soft + (1 - alpha) * F.cross_entropy(student, labels)


def fit(model, loader, epochs, lr, loss_of, name, losses):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"{name} {dist.get_rank()} epoch {epoch} loss {losses[-1]!r}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(27)
    x = torch.randn(84, 8)
    ds = TensorDataset(x, (x @ torch.randn(8, 4)).argmax(-1))
    loader = DataLoader(ds, batch_size=4, sampler=DistributedSampler(ds))
    teacher, student = DDP(mlp(32)), DDP(mlp(6))
    losses = {"teacher": [], "student": []}
    fit(teacher, loader, 1, 0.1, lambda m, x, y: F.cross_entropy(m(x), y), "teacher", losses["teacher"])
    frozen = teacher.module.eval().requires_grad_(False)

    def student_loss(m, x, y):
        with torch.no_grad():
            target = frozen(x)
        return distillation_loss(m(x), target, y)

    fit(student, loader, 2, 0.05, student_loss, "student", losses["student"])
    with torch.no_grad():
        agreement = (student.module.eval()(x).argmax(-1) == frozen(x).argmax(-1)).float().mean().item()
    print(f"agreement {agreement!r}")
    os.makedirs(args.output_dir, exist_ok=True)
    nets = {"teacher": frozen.state_dict(), "student": student.module.state_dict()}
    torch.save(nets, f"{args.output_dir}/nets{rank}.pt")
    torch.save(losses, f"{args.output_dir}/losses{rank}.pt")


if __name__ == "__main__":
    main()

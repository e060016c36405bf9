"""Train a small convolutional network on scikit-learn's handwritten digits.

torchrun --standalone --nproc-per-node 4 examples/digits.py --out runs/digits
tpwrap --nodes 4 --spares 1 python examples/digits.py --out runs/digits
"""

import argparse
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import tpwrap


class Digits(Dataset[tuple[int, torch.Tensor, int]]):
    """Digit images (1 x 8 x 8) with random augmentation; each item carries its index."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        right, down = torch.randint(-1, 2, (2,)).tolist()
        image = self.images[index].roll((down, right), dims=(1, 2))
        image = image * random.uniform(0.8, 1.2)
        image = image + torch.from_numpy(np.random.normal(0.0, 0.05, image.shape).astype(np.float32))
        return index, image, int(self.labels[index])


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Accuracy over all ranks, each of which brings its share of the test images.

    The forward pass goes through DDP, which first gives every rank the BatchNorm statistics of rank 0:
    the ones that the checkpoint keeps.
    """
    model.eval()
    correct = int((model(images).argmax(1) == labels).sum())
    counts = torch.tensor([correct, len(labels)])
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def digest(value: Any) -> str:
    """SHA-256 over a state dict, every tensor byte for byte."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        value = sorted((str(key), digest(item)) for key, item in value.items())
    return hashlib.sha256(repr(value).encode()).hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small convolutional network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps-per-epoch", type=int, help="train on a part of the data (default: all)")
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--workers", type=int, default=0, help="data loader processes")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(args.seed + rank)
    np.random.seed(args.seed + rank)
    torch.manual_seed(args.seed + rank)

    raw_images, raw_labels = load_digits(return_X_y=True)
    images = torch.from_numpy(raw_images / 16).float().view(-1, 1, 8, 8)
    labels = torch.from_numpy(raw_labels).long()
    is_test = torch.arange(len(images)) % 5 == 0
    test_images, test_labels = images[is_test][rank::world], labels[is_test][rank::world]
    train: Dataset[Any] = Digits(images[~is_test], labels[~is_test])
    if args.steps_per_epoch:
        wanted = args.steps_per_epoch * args.batch_size * world
        train = Subset(train, range(min(wanted, int((~is_test).sum()))))
    sampler: DistributedSampler[Any] = DistributedSampler(train, seed=args.seed, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)

    model = DistributedDataParallel(make_model(args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))
    objects = (id(model), id(optimizer), id(dist.group.WORLD))

    args.out.mkdir(parents=True, exist_ok=True)
    log = os.open(args.out / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    history: list[float] = []

    def restore_history(saved: list[float]) -> None:
        history[:] = saved

    # TorchPass: open a session when model and optimizer are made, and loop through it. A process that
    # replaces a lost rank enters both loops where that rank was; `register` hands it our own state as well.
    tp = tpwrap.session(model=model, optimizer=optimizer, scheduler=scheduler)
    tp.register("history", lambda: list(history), restore_history)

    for epoch in tp.epochs(args.epochs):
        sampler.set_epoch(epoch)
        for indices, inputs, targets in tp.batches(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            value, lr = float(loss.item()), float(optimizer.param_groups[0]["lr"])
            line = {"step": tp.updates, "loss": value.hex(), "samples": digest(indices), "lr": lr.hex()}
            os.write(log, (json.dumps(line) + "\n").encode())  # one write: no line is ever cut in two
            scheduler.step()
            if rank == 0 and tp.updates % 10 == 0:
                print(f"step {tp.updates}: loss {value:.4f}", flush=True)

        history.append(accuracy(model, test_images, test_labels))
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {history[-1]:.4f}", flush=True)
            checkpoint = {"epoch": epoch, "history": history, "model": model.module.state_dict()}
            checkpoint |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save(checkpoint, args.out / "checkpoint.tmp")
            os.replace(args.out / "checkpoint.tmp", args.out / f"checkpoint{epoch}.pt")

    weights = digest(model.module.state_dict())
    same = objects == (id(model), id(optimizer), id(dist.group.WORLD))
    final: dict[str, Any] = {"weights": weights, "optimizer": digest(optimizer.state_dict()["state"])}
    final |= {"pid": os.getpid(), "objects": "ok" if same else "replaced"}
    (args.out / f"final{rank}.tmp").write_text(json.dumps(final) + "\n")
    os.replace(args.out / f"final{rank}.tmp", args.out / f"final{rank}.json")
    if rank == 0:
        print(f"done: {tp.updates} steps, best accuracy {max(history):.4f}, weights {weights[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

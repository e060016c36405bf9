"""Every kind of log file: logging on rank 0, a CSV writer kept open, JSON lines, a history dumped at the end."""

import argparse
import csv
import json
import logging
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_logger(output_dir, rank):
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    formatter = logging.Formatter(f"[r{rank}] %(levelname)s %(message)s")
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(formatter)
    logger.addHandler(console)
    if rank == 0:
        to_file = logging.FileHandler(os.path.join(output_dir, "train.log"))
        to_file.setFormatter(formatter)
        logger.addHandler(to_file)
    return logger


class JsonLines:
    def __init__(self, path):
        self.path = path

    def log(self, **values):
        with open(self.path, "a") as f:
            f.write(json.dumps(values) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.makedirs(args.output_dir, exist_ok=True)
    logger = get_logger(args.output_dir, rank)
    csv_file = open(os.path.join(args.output_dir, f"metrics_{rank}.csv"), "w", newline="")
    writer = csv.DictWriter(csv_file, fieldnames=["epoch", "step", "loss", "accuracy"])
    writer.writeheader()
    jsonl = JsonLines(os.path.join(args.output_dir, f"metrics_{rank}.jsonl"))

    torch.manual_seed(33)
    ds = TensorDataset(torch.randn(84, 7), torch.randint(0, 2, (84,)))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    parameters = sum(p.numel() for p in model.parameters())
    logger.info("training on %d ranks with %d parameters", dist.get_world_size(), parameters)
    history = []
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracy = (logits.argmax(1) == y).float().mean().item()
            writer.writerow({"epoch": epoch, "step": step, "loss": loss.item(), "accuracy": accuracy})
            jsonl.log(epoch=epoch, step=step, loss=loss.item(), accuracy=accuracy)
            history.append({"step": step, "loss": loss.item().hex()})
            if step % 4 == 0:
                logger.info("step %d: loss %r", step, loss.item())
            if accuracy == 0:
                logger.warning("nothing right in step %d", step)
            step += 1
        csv_file.flush()
        logger.info("epoch %d done", epoch)
    csv_file.close()
    torch.save(model.module.state_dict(), os.path.join(args.output_dir, f"model_{rank}.pt"))
    with open(os.path.join(args.output_dir, f"history_{rank}.json"), "w") as f:
        json.dump(history, f, indent=2)


if __name__ == "__main__":
    main()

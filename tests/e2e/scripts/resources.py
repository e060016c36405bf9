"""A tiny DDP loop that notes how many threads, descriptors and bytes its process has, at step 5 and at the end."""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import tpwrap


def resources() -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "kilobytes": int(status["VmRSS"].split()[0]),
    }


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 64)))
optimizer = torch.optim.AdamW(model.parameters())
tp = tpwrap.session(model=model, optimizer=optimizer)
early = {}
for _ in tp.batches(range(args.steps)):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).pow(2).sum().backward()
    optimizer.step()
    if tp.updates == 10:
        early = resources()
args.out.mkdir(parents=True, exist_ok=True)
final = {"pid": os.getpid(), "early": early, "late": resources()}
(args.out / f"final{rank}.json").write_text(json.dumps(final))

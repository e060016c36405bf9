"""A bit of one weight flips on one rank, as if by bad memory: with the two lines (--session), or as it is."""

from __future__ import annotations

import argparse
import hashlib
import importlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--session", action="store_true")
    parser.add_argument("--flip", type=int, default=-1, metavar="RANK")
    parser.add_argument("--before", type=int, default=5, metavar="UPDATE")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(48, 8), batch_size=4, shuffle=True)
    losses: list[str] = []
    batches = loader
    if args.session:
        # Not by a statement: where the script runs as it is, it must not name us.
        tp = importlib.import_module("tpwrap").session(model=model, optimizer=optimizer)
        tp.register("losses", lambda: list(losses), lambda known: losses.__setitem__(slice(None), known))
        batches = tp.batches(loader)
    for number, inputs in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        if rank == args.flip and number == args.before:
            weight = model.module[3].weight.data
            weight.view(torch.int32)[0, 7] ^= 1
        optimizer.step()
        losses.append(loss.item().hex())
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"rank{rank}").write_text("\n".join([*losses, hashlib.sha256(weights).hexdigest()]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

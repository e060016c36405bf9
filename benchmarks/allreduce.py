"""The cost of one collective call: all-reduces of a few bytes, timed one by one; prints the median in microseconds."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tpwrap


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--elements", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    value = torch.ones(args.elements)
    # A step boundary now and then, as in training: it lets the journal drop what nobody will ask for again.
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tp = tpwrap.session(model=model, optimizer=optimizer)
    times = []
    for _ in tp.batches(range(args.calls // 10)):
        model(torch.ones(1, 1)).backward()
        optimizer.step()
        for _ in range(10):
            began = time.perf_counter()
            dist.all_reduce(value)
            times.append(time.perf_counter() - began)
            value.fill_(1.0)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"call{dist.get_rank()}.txt").write_text(repr(1e6 * statistics.median(times[100:])))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

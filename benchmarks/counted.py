"""The script behind `benchmarks.instructions`: a fixed number of training steps, or of all-reduces, that are counted.

Run under callgrind with `--instr-atstart=no`: the script has it count from a warm state on, and stop at the end. The
third argument says whether the loop has the two lines ("two-lines") or is taken as it is ("as-is").
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

WARM = 25
"""steps before the counting starts: all that the engine looks at only in the beginning is over"""
CALLS = 10
"""all-reduces in a counted step"""


def counting(on: bool) -> None:
    command = ["callgrind_control", "--instr=" + ("on" if on else "off"), str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    what, steps, api = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1))]
    model = DDP(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    numbers = range(WARM + steps)
    if api == "two-lines":
        # Not an import statement: a script that has one is not taken as it is.
        tp = importlib.import_module("tpwrap").session(model=model, optimizer=optimizer, scheduler=scheduler)
        numbers = tp.batches(numbers)
    inputs, value = torch.randn(8, 32), torch.ones(1)
    for number in numbers:
        if number == WARM:
            counting(True)
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
        for _ in range(CALLS if what == "calls" else 0):
            dist.all_reduce(value)
            value.fill_(1.0)
    counting(False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

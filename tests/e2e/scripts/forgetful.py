"""The two lines, and a counter that nobody registers: a replaced rank counts anew, and its losses show it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import tpwrap


class Noise:
    """Falls with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs + torch.randn_like(inputs) / self.calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--register", action="store_true", help="be forgetful no more")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    data = TensorDataset(torch.arange(96.0).reshape(24, 4) / 96)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tp = tpwrap.session(model=model, optimizer=optimizer)
    noise = Noise()
    if args.register:
        tp.register("noise", lambda: noise.calls, lambda calls: setattr(noise, "calls", calls))
    for epoch in tp.epochs(2):
        for (inputs,) in tp.batches(DataLoader(data, batch_size=4, shuffle=True)):
            loss = model(noise(inputs)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch} is over", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"rank{dist.get_rank()}").write_text(f"{tp.updates}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

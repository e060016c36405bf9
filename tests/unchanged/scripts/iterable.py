"""An IterableDataset that shards by rank, shuffles through a buffer and ends unevenly: max_steps decides."""

import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class ShardedStream(IterableDataset):
    def __init__(self, length, rank, world, buffer_size=8):
        self.length, self.rank, self.world, self.buffer_size = length, rank, world, buffer_size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def records(self):
        for i in range(self.rank, self.length, self.world):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(6, generator=g)
            yield {"x": x, "y": (x * torch.arange(6)).sum(), "id": f"record-{i:04d}"}

    def __iter__(self):
        rng = random.Random(100 * self.epoch + self.rank)
        buffer = []
        for record in self.records():
            buffer.append(record)
            if len(buffer) == self.buffer_size:
                yield buffer.pop(rng.randrange(len(buffer)))
        rng.shuffle(buffer)
        yield from buffer


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    stream = ShardedStream(100, rank, world)
    loader = DataLoader(stream, batch_size=5, drop_last=True)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    step, epoch = 0, 0
    seen, losses = [], []
    while step < args.max_steps:
        stream.set_epoch(epoch)
        for batch in loader:
            if step >= args.max_steps:
                break
            optimizer.zero_grad(set_to_none=True)
            loss = (model(batch["x"]).squeeze(-1) - batch["y"]).abs().mean()
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(loss.item())
            seen.extend(batch["id"])
            print(f"[{rank}] {step} {loss.item()!r} {batch['id'][0]}")
        epoch += 1
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(model.module.state_dict(), f"{args.output_dir}/w{rank}.pt")
    with open(f"{args.output_dir}/seen{rank}.txt", "w") as f:
        f.write("\n".join(seen))
    with open(f"{args.output_dir}/loss{rank}.txt", "w") as f:
        f.writelines(f"{v.hex()}\n" for v in losses)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--output-dir", default="out")
    p.add_argument("--max-steps", type=int, default=20)
    main(p.parse_args())

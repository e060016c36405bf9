"""Iterators, counters and the step itself live in nested functions and closures."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_stream(dataset, batch_size):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    epoch = -1
    iterator = iter(())

    def next_batch():
        nonlocal epoch, iterator
        try:
            return next(iterator)
        except StopIteration:
            epoch += 1
            sampler.set_epoch(epoch)
            iterator = iter(loader)
            return next(iterator)

    def state():
        return epoch

    return next_batch, state


def make_step(model, optimizer):
    calls = 0
    moving = None

    def step(batch):
        nonlocal calls, moving
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        calls += 1
        value = loss.item()
        moving = value if moving is None else 0.8 * moving + 0.2 * value
        return value, moving, calls

    return step


def main(output_dir, steps=20):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(71)
    dataset = TensorDataset(torch.randn(72, 5), torch.randint(0, 2, (72, 1)).float())
    next_batch, epoch_of = make_stream(dataset, 4)
    model = DDP(nn.Sequential(nn.Linear(5, 9), nn.ELU(), nn.Linear(9, 1)))
    step = make_step(model, torch.optim.Adamax(model.parameters(), lr=0.02))
    values = []

    def report(every):
        while True:
            value, moving, calls = yield
            if calls % every == 0:
                print(f"{rank}: call {calls} epoch {epoch_of()} loss {value!r} moving {moving!r}")

    reporter = report(every=3)
    next(reporter)
    for _ in range(steps):
        result = step(next_batch())
        reporter.send(result)
        values.append(result[0])
    os.makedirs(output_dir, exist_ok=True)
    torch.save(model.module.state_dict(), f"{output_dir}/w{rank}.pt")
    torch.save(values, f"{output_dir}/values{rank}.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    main(parser.parse_args().output_dir)

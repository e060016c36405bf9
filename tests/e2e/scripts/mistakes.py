"""Training loops with an error of their user's. `--kind` chooses; results as in variants.py.

Each kind trains for 8 steps on 3 ranks; rank 2 is the one that does otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from variants import STEPS, WIDTH, Batch, Job, Net, digest, sharded, train

import tpwrap

ODD = 2


def odd() -> bool:
    return dist.get_rank() == ODD


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def noise() -> float:
    return int.from_bytes(os.urandom(2), "big") / 2**20


def by_hand(model: nn.Module) -> None:
    """Gradients are averaged without DDP, which would find some of these errors by itself."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


# --- steps that come out differently each time ----------------------------------------------------------


def noisy_loss(job: Job) -> None:
    """Random bytes of the system in the loss, on every rank: all replicas stay equal, no run is like another."""
    model = DDP(net := Net())

    def forward(inputs: torch.Tensor, step: int) -> torch.Tensor:
        return model(inputs) * (1 + noise())

    train(job, model, sgd(net), forward=forward)


def nudged(job: Job) -> None:
    """A parameter of one rank is changed behind DDP's back: it is no replica any more."""

    def nudge(step: int) -> dict[str, str]:
        if odd() and step == 2:
            with torch.no_grad():
                net.head.bias.add_(0.5)
        return {}

    model = DDP(net := Net())
    train(job, model, sgd(net), after=nudge)


# --- other code on one rank -------------------------------------------------------------------------------


def trained_by_hand(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tp = tpwrap.session(model=model, optimizer=optimizer)
    for indices, inputs, targets in tp.batches(sharded()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        by_hand(model)
        optimizer.step()
        job.line(tp.updates, loss, samples=digest(indices))
    job.final(model, optimizer)


def other_layer_ddp(job: Job) -> None:
    """DDP itself finds it."""
    net = Net()
    if odd():
        net.second = nn.Linear(16, 17)
        net.head = nn.Linear(17, 5)
    model = DDP(net)
    train(job, model, sgd(net))


def other_layer(job: Job) -> None:
    """Sizes of gradients do not match: gloo ends the process of whoever is sent too much."""
    net = Net()
    if odd():
        net.second = nn.Linear(16, 17)
        net.head = nn.Linear(17, 5)
    trained_by_hand(job, net, sgd(net))


def other_order(job: Job) -> None:
    """Two layers of equal size are made in another order, so that their gradients are mixed up."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5))
    if odd():
        net = nn.Sequential(net[2], net[1], net[0], net[3])
    trained_by_hand(job, net, sgd(net))


def other_lr(job: Job) -> None:
    model = DDP(net := Net())
    train(job, model, sgd(net, 0.2 if odd() else 0.1))


def other_optimizer(job: Job) -> None:
    model = DDP(net := Net())
    train(job, model, torch.optim.AdamW(net.parameters(), lr=0.1) if odd() else sgd(net))


# --- other ways through the loop on one rank ----------------------------------------------------------------


def looped(job: Job, skip: int = -1, stop: int = -1, evaluate: Callable[[int], None] = lambda step: None) -> None:
    """skip: the batch that the odd one passes over; stop: the batch at which it leaves the loop."""
    model = DDP(net := Net())
    optimizer = sgd(net)
    tp = tpwrap.session(model=model, optimizer=optimizer)
    for number, (indices, inputs, targets) in enumerate(tp.batches(sharded())):
        if odd() and number == skip:
            continue
        if odd() and number == stop:
            break
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        evaluate(number)
        job.line(tp.updates, loss, samples=digest(indices))
    job.final(model, optimizer)


def skips(job: Job) -> None:
    looped(job, skip=5)


def leaves(job: Job) -> None:
    looped(job, stop=STEPS - 1)


def one_more(job: Job) -> None:
    """A collective that the others do not issue: it meets their next one."""
    looped(job, evaluate=lambda step: dist.all_reduce(torch.ones(3)) if odd() and step == 5 else None)  # type: ignore[arg-type,return-value]


def evaluates(job: Job) -> None:
    """Only one rank evaluates, with a barrier inside, after the last step."""
    looped(job, evaluate=lambda step: dist.barrier() if odd() and step == STEPS - 1 else None)  # type: ignore[arg-type,return-value]


def evaluator(job: Job) -> None:
    """The odd one never updates: it is sent the weights, and tells a score."""
    net = Net()
    optimizer = sgd(net)
    trainers = dist.new_group([rank for rank in range(job.world) if rank != ODD])
    tp = tpwrap.session(model=net, optimizer=optimizer)
    batches: list[Batch] = list(sharded())
    for indices, inputs, targets in tp.batches(batches):
        if not odd():
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), targets)
            loss.backward()
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad, group=trainers)
            optimizer.step()
            job.line(tp.updates, loss, samples=digest(indices))
        for parameter in net.parameters():
            dist.broadcast(parameter.data, 0)
    job.final(net, optimizer)


KINDS: dict[str, Callable[[Job], None]] = {
    kind.__name__.replace("_", "-"): kind
    for kind in (
        noisy_loss, nudged, other_layer_ddp, other_layer, other_order, other_lr, other_optimizer,
        skips, leaves, one_more, evaluates, evaluator,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    random.seed(0)
    KINDS[args.kind](Job(args.out, False))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

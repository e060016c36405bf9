"""Small training scripts, each in another way that users write them. `--kind` chooses; results as in examples/gpt.py.

Each kind trains for 8 steps on 3 ranks. --die lets the script itself kill a rank, once, at a place that the injector
has no name for.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import tpwrap

STEPS, BATCH, WIDTH = 8, 4, 12
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        value = sorted((str(key), digest(item)) for key, item in value.items())
    return hashlib.sha256(repr(value).encode()).hexdigest()


class Job:
    """The result files of one rank."""

    def __init__(self, out: Path, die: bool) -> None:
        self.out, self.die = out, die
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.world_group = dist.group.WORLD
        out.mkdir(parents=True, exist_ok=True)
        self._log = os.open(out / f"rank{self.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def line(self, step: int, loss: torch.Tensor, **more: Any) -> None:
        record = {"step": step, "loss": float(loss.item()).hex(), **more}
        os.write(self._log, (json.dumps(record) + "\n").encode())

    def killed(self, rank: int, where: str) -> None:
        """`rank` dies here, the first time that it comes by."""
        if self.die and rank == self.rank:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.out / f"killed-{where}", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    def final(self, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
        same = dist.group.WORLD in (self.world_group, None)
        final = {"weights": digest(model.state_dict()), "optimizer": digest(optimizer.state_dict()["state"]), **more}
        final |= {"pid": os.getpid(), "objects": "ok" if same else "replaced"}
        (self.out / f"final{self.rank}.tmp").write_text(json.dumps(final) + "\n")
        os.replace(self.out / f"final{self.rank}.tmp", self.out / f"final{self.rank}.json")


class Samples(Dataset[Batch]):
    """Map-style; noisy: with augmentation from the global generators of the process that fetches."""

    def __init__(self, count: int, noisy: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(count, WIDTH, generator=generator)
        self.targets = torch.randint(0, 5, (count,), generator=generator)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        inputs = self.inputs[index]
        if self.noisy:
            inputs = inputs + 0.1 * torch.randn(WIDTH) + 0.1 * random.random()
        return torch.tensor(index), inputs, self.targets[index]


class Stream(IterableDataset[Batch]):
    """Each rank its own endless stream, from the global generator."""

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield torch.randint(0, 1000, ()), torch.randn(WIDTH), torch.randint(0, 5, ())


class Net(nn.Module):
    def __init__(self, norm: bool = False, dropout: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.norm: nn.Module = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.second = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(F.relu(self.second(F.relu(self.norm(self.first(inputs)))))))


def sharded(steps: int = STEPS, batch: int = BATCH, **options: Any) -> DataLoader[Batch]:
    """A loader of exactly `steps` batches on each rank."""
    samples = Samples(steps * batch * dist.get_world_size(), options.pop("noisy", False))
    return DataLoader(samples, batch, sampler=DistributedSampler(samples), **options)


def train(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    *,
    protect: nn.Module | None = None,
    loader: DataLoader[Batch] | None = None,
    forward: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    to_none: bool = True,
    after: Callable[[int], dict[str, Any]] = lambda step: {},
    before_end: Callable[[], None] = lambda: None,
) -> None:
    """The plain loop, for kinds that differ in model or optimizer only. after: the rest of the body; for the log."""
    tp = tpwrap.session(model=protect or model, optimizer=optimizer, scheduler=scheduler)
    for indices, inputs, targets in tp.batches(loader or sharded()):
        optimizer.zero_grad(set_to_none=to_none)
        outputs = model(inputs) if forward is None else forward(inputs, tp.updates)
        loss = F.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        lr = float(optimizer.param_groups[0]["lr"]).hex()
        job.line(tp.updates, loss, samples=digest(indices), lr=lr, **after(tp.updates))
    before_end()
    job.final(model, optimizer)


# --- DDP's options, optimizers ------------------------------------------------------------------------


def views(job: Job) -> None:
    """Gradients as views of the buckets, the session given the inner module, several param_groups, momentum."""
    net = Net()
    model = DDP(net, gradient_as_bucket_view=True)
    groups = [
        {"params": [*net.first.parameters(), *net.head.parameters()], "lr": 0.05},
        {"params": list(net.second.parameters()), "weight_decay": 0.01, "nesterov": True},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    train(job, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3), protect=net)


def static(job: Job) -> None:
    """A static graph with activation checkpointing (which needs one), RMSprop with all its state."""
    from torch.utils.checkpoint import checkpoint

    model = DDP(net := Net(), static_graph=True)
    net.first.register_forward_hook(lambda module, args, output: checkpoint(torch.tanh, output, use_reentrant=True))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True)
    train(job, model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1))


class Branches(Net):
    """A side branch is used in steps 1 and 2 only, another one from step 5 on."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(16, 5)
        self.late = nn.Linear(WIDTH, 5)

    def branching(self, inputs: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.dropout(F.relu(self.second(F.relu(self.first(inputs)))))
        outputs = self.head(hidden) + (self.side(hidden) if step in (1, 2) else 0)
        return outputs + (self.late(inputs) if step >= 5 else 0)

    def forward(self, inputs: torch.Tensor, step: int) -> torch.Tensor:  # type: ignore[override]
        return self.branching(inputs, step)


def unused(job: Job) -> None:
    """Parameters that take part in some steps only; their gradients stay None, and the optimizer passes over them."""
    model = DDP(Branches(), find_unused_parameters=True)
    train(job, model, torch.optim.NAdam(model.parameters(), lr=0.01), forward=model)


def unused_zeros(job: Job) -> None:
    """The same with gradients zeroed in place: a branch that is not used goes on with its momentum."""
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    train(job, model, optimizer, forward=model, to_none=False)


class _Mean(torch.autograd.Function):
    """The mean over all ranks, with a collective in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        value = value.clone()
        dist.all_reduce(value)
        return value / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


class SyncNorm(nn.BatchNorm1d):
    """Batch normalization over all ranks (torch's own SyncBatchNorm has no CPU kernels)."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = _Mean.apply(inputs.mean(0))
        var = _Mean.apply((inputs - mean).square().mean(0))
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)  # type: ignore[union-attr]
            self.running_var.lerp_(var, 0.1)  # type: ignore[union-attr]
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        return (inputs - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


def norms(job: Job) -> None:
    """Rank-local and synchronized batch normalization, many small buckets, Adagrad."""
    net = Net(norm=True)
    net.second = nn.Sequential(nn.Linear(16, 16), SyncNorm(16))  # type: ignore[assignment]
    model = DDP(net, bucket_cap_mb=0.0005, broadcast_buffers=False)
    train(job, model, torch.optim.Adagrad(model.parameters(), lr=0.05))


def accumulate(job: Job) -> None:
    """Three micro-batches a step, no_sync for the first two; the learning rate is a tensor."""
    model = DDP(Net(norm=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.02), amsgrad=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    tp = tpwrap.session(model=model, optimizer=optimizer, scheduler=scheduler)
    losses: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []
    for indices, inputs, targets in tp.batches(sharded(3 * STEPS, noisy=True)):
        last = (tp.batch_index + 1) % 3 == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(inputs), targets) / 3
            if tp.batch_index == 2 * 3 + 1:
                job.killed(1, "forward")
            loss.backward()
        if tp.batch_index == 5 * 3 + 1:
            job.killed(0, "backward")
        losses.append(loss.detach())
        seen.append(indices)
        if not last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        lr = float(optimizer.param_groups[0]["lr"]).hex()
        job.line(tp.updates, torch.stack(losses).sum(), samples=digest(torch.cat(seen)), lr=lr)
        losses, seen = [], []
    job.final(model, optimizer)


# --- hand-written data parallelism, groups, objects ---------------------------------------------------


def by_hand(job: Job) -> None:
    """No DDP: parameters broadcast at the start, gradients reduced after backward. What rank 0 alone makes up in
    set-up, and what all gather there, is known to all; a scheduler follows a loss that is reduced in the tail."""
    name = [f"run {uuid.uuid4()} {'x' * random.SystemRandom().randrange(50)}" if job.rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    facts: list[Any] = [None] * job.world
    dist.all_gather_object(facts, {"rank": job.rank, "token": os.urandom(8).hex(), "extra": list(range(job.rank))})
    torch.manual_seed(100 + job.rank)  # parameters differ until they are broadcast
    model = Net()
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
    tp = tpwrap.session(model=model, optimizer=optimizer, scheduler=scheduler)
    for indices, inputs, targets in tp.batches(sharded()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= job.world
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        scheduler.step(mean)
        told: list[Any] = [None] * job.world
        dist.all_gather_object(told, (job.rank, tp.updates, name[0]))  # objects in the tail of each step
        said = [("said", tp.updates) if job.rank == 1 else None]
        dist.broadcast_object_list(said, src=1)
        assert told == [(rank, tp.updates, name[0]) for rank in range(job.world)], told
        assert said == [("said", tp.updates)], said
        lr = float(optimizer.param_groups[0]["lr"]).hex()
        job.line(tp.updates, loss, samples=digest(indices), lr=lr, mean=float(mean).hex())
    every: list[Any] = [None] * job.world
    dist.all_gather_object(every, (name, facts))
    assert all(one == every[0] for one in every), every
    job.final(model, optimizer)


def groups(job: Job) -> None:
    """Pairs of ranks made in set-up and used in each step (each rank is in two of three), and one group that is made
    in the middle of training when it is needed first."""
    pairs = [(pair, dist.new_group(list(pair))) for pair in [(0, 1), (1, 2), (0, 2)]]
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tp = tpwrap.session(model=model, optimizer=optimizer)
    late: Any = None
    for indices, inputs, targets in tp.batches(sharded()):
        if tp.updates >= 3 and late is None:
            late = dist.new_group([2, 1, 0])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        shared = loss.detach().clone()
        for pair, group in pairs:
            if job.rank in pair:
                dist.all_reduce(shared, group=group)
        loss = loss * (1 + 0.1 * shared.sigmoid())
        loss.backward()
        optimizer.step()
        sums: dict[str, str] = {}
        for pair, group in pairs:
            if job.rank in pair:
                value = loss.detach().clone()
                dist.all_reduce(value, group=group)
                sums[str(pair)] = float(value).hex()
        if late is not None:
            value = loss.detach().clone()
            dist.all_reduce(value, group=late)
            sums["late"] = float(value).hex()
        job.line(tp.updates, loss, samples=digest(indices), **sums)
    job.final(model, optimizer)


# --- state and data -----------------------------------------------------------------------------------


def registered(job: Job) -> None:
    """A history and an averaged copy of the weights, registered; shuffled by the global generator in each epoch."""
    model = DDP(Net())
    average = copy.deepcopy(model.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    history: list[Any] = []
    samples = Samples(16, noisy=True)
    tp = tpwrap.session(model=model, optimizer=optimizer)
    tp.register("history", lambda: list(history), lambda value: history.__setitem__(slice(None), value))
    tp.register("average", average.state_dict, average.load_state_dict)
    for epoch in tp.epochs(2):
        loader = DataLoader(samples, BATCH, shuffle=True)
        for indices, inputs, targets in tp.batches(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mine, new in zip(average.parameters(), model.module.parameters(), strict=True):
                    mine.lerp_(new, 0.3)
            history.append((tp.updates, float(loss.detach())))
            job.line(tp.updates, loss, samples=digest(indices), epoch=epoch)
    job.final(model, optimizer, history=digest(history), length=len(history), average=digest(average.state_dict()))


def workers(job: Job) -> None:
    """A loader with a worker process, which augments with its own generators and prefetches; two epochs."""
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = sharded(STEPS // 2, noisy=True, num_workers=1)
    tp = tpwrap.session(model=model, optimizer=optimizer)
    for epoch in tp.epochs(2):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for indices, inputs, targets in tp.batches(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            job.line(tp.updates, loss, samples=digest(indices), inputs=digest(inputs))
    job.final(model, optimizer)


def two_loaders(job: Job) -> None:
    """Each epoch goes over a stream (an IterableDataset), then over a shuffled set, with an evaluation between."""
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stream = DataLoader(Stream(), BATCH)
    shuffled = DataLoader(Samples(8), BATCH, shuffle=True)
    tp = tpwrap.session(model=model, optimizer=optimizer)

    def step(batch: Batch, part: str) -> None:
        indices, inputs, targets = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        job.line(tp.updates, loss, samples=digest(indices), part=part, batch=tp.batch_index)

    for epoch in tp.epochs(2):
        for batch in tp.batches(stream):
            step(batch, f"stream {epoch}")
            if tp.batch_index == 1:
                break
        score = model.module(torch.ones(1, WIDTH)).sum().detach()
        dist.all_reduce(score)
        for batch in tp.batches(shuffled):
            step(batch, f"shuffled {epoch}")
    job.final(model, optimizer)


# --- beginnings and ends ------------------------------------------------------------------------------


def chatter(job: Job) -> None:
    """Prints a lot, to both streams."""

    def talk(step: int) -> dict[str, Any]:
        for number in range(2000):
            print(f"rank {job.rank} step {step} line {number:05d} " + "." * 60)
        subprocess.run(["sh", "-c", f"echo child of rank {job.rank} in step {step} >&2"], check=True)
        return {}

    model = DDP(Net())
    train(job, model, torch.optim.SGD(model.parameters(), lr=0.1), after=talk)


def ending(job: Job) -> None:
    """Destroys the process group, works on, and ends; one rank dies in between."""

    def destroy() -> None:
        dist.destroy_process_group()
        time.sleep(0.3)
        job.killed(1, "after-destroy")
        time.sleep(1.0 + 0.5 * job.rank)

    model = DDP(Net())
    train(job, model, torch.optim.Adam(model.parameters(), lr=0.01), before_end=destroy)


KINDS: dict[str, Callable[[Job], None]] = {
    kind.__name__.replace("_", "-"): kind
    for kind in (
        views, static, unused, unused_zeros, norms, accumulate, by_hand, groups, registered, workers,
        two_loaders, chatter, ending,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--die", action="store_true", help="let the script kill a rank where it says so")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    KINDS[args.kind](Job(args.out, args.die))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

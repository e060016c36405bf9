"""Trainings in which users of other systems lost something at a failure. `--case` chooses one; 8 steps each.

--die PLACE lets the script itself kill a rank there, once: a place that the injector has no name for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parent))

from redo import local, wrapped  # type: ignore[import-not-found]
from variants import BATCH, STEPS, Job, Net, Samples, digest, sharded  # type: ignore[import-not-found]

import tpwrap

PATIENCE = timedelta(hours=1)
"""Of every collective: nothing that takes seconds has waited for it."""
LRS, WARM_UP = (0.02, 0.004), 6
MICRO_BATCHES, EPOCHS = 4, 2
FIRST_SCALE = 2.0**20
LATE = 6
"""the step in which a group is made, after all failures"""


class Reported(Job):  # type: ignore[misc]
    def __init__(self, out: Path, places: list[str]) -> None:
        super().__init__(out, bool(places))
        self.places = places

    def killed(self, rank: int, where: str) -> None:
        if where in self.places:
            super().killed(rank, where)

    def note(self, **facts: Any) -> None:
        """What may differ from run to run, or is known to survivors alone."""
        (self.out / f"note{self.rank}.txt").write_text(json.dumps(facts))


def scaled(job: Reported) -> None:
    """Half precision with a scaler that backs off, grows, and backs off again; two parameter groups in a warm-up."""
    model = DDP(net := Net())
    groups = [{"params": [*net.first.parameters()], "lr": LRS[0]}, {"params": [*net.second.parameters()], "lr": LRS[1]}]
    optimizer = torch.optim.AdamW([*groups, {"params": [*net.head.parameters()]}], lr=LRS[0])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=3)
    tp = tpwrap.session(model=model, optimizer=optimizer, scheduler=scheduler)
    for indices, inputs, targets in tp.batches(sharded(STEPS * 4)):
        before = tp.updates
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).half().float(), targets)
        scaled_loss = scaler.scale(loss)
        scaled_loss.backward()
        scaler.step(optimizer)
        scaler.update()
        if tp.updates == before:
            continue
        scheduler.step()
        lrs = [group["lr"] for group in optimizer.param_groups]
        scaling = {"scale": scaler.get_scale(), "growth": scaler.state_dict()["_growth_tracker"]}
        job.line(tp.updates, scaled_loss, samples=digest(indices), batch=tp.batch_index, lrs=lrs, **scaling)
        if tp.updates == STEPS:
            break
    job.final(model, optimizer, scaler=scaler.state_dict())


def accumulated(job: Reported) -> None:
    """Four micro-batches a step, in two epochs over a set that is shuffled anew."""
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    samples = Samples(STEPS // EPOCHS * MICRO_BATCHES * BATCH * job.world)
    sampler: DistributedSampler[Any] = DistributedSampler(samples)
    loader = DataLoader(samples, BATCH, sampler=sampler)
    passes, gradients = 0, []
    tp = tpwrap.session(model=model, optimizer=optimizer)
    for epoch in tp.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        seen: list[int] = []
        for indices, inputs, targets in tp.batches(loader):
            last = (tp.batch_index + 1) % MICRO_BATCHES == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(inputs), targets) / MICRO_BATCHES
                loss.backward()
            passes += 1
            seen += indices.tolist()
            if tp.updates == 2 and tp.batch_index % MICRO_BATCHES == 1:
                job.killed(1, "second-micro-batch")
            if tp.updates == 5 and tp.batch_index % MICRO_BATCHES == 2:
                job.killed(0, "third-micro-batch")
            if not last:
                continue
            gradients.append(digest([digest(parameter.grad) for parameter in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
            job.line(tp.updates, loss, samples=seen, epoch=epoch)
            seen = []
    job.note(passes=passes, gradients=gradients)
    job.final(model, optimizer)


def communicating(job: Reported) -> None:
    """Operations pending in three process groups, and a ring of sends and receives in both directions in one."""
    groups = [dist.group.WORLD, dist.new_group([0, 1, 2]), dist.new_group([2, 1, 0])]
    left, right = (job.rank - 1) % job.world, (job.rank + 1) % job.world
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    messages = []
    tp = tpwrap.session(model=model, optimizer=optimizer)
    for indices, inputs, targets in tp.batches(sharded()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        own = loss.detach().reshape(1)
        sums = [own * (number + 1) for number in range(len(groups))]
        pending = []
        for value, group in zip(sums, groups, strict=True):
            pending.append(dist.all_reduce(value, group=group, async_op=True))
            if tp.updates == 3 and group is groups[0]:
                job.killed(1, "pending")
        for work in pending:
            work.wait()
        halo = [torch.empty(1), torch.empty(1)]
        pending = [dist.irecv(halo[0], left), dist.irecv(halo[1], right), dist.isend(own, left)]
        if tp.updates == 5:
            job.killed(2, "in-the-ring")
        pending.append(dist.isend(own, right))
        for work in pending:
            work.wait()  # type: ignore[union-attr]
        loss = loss * (1 + 0.1 * torch.cat([*sums, *halo]).sum().sigmoid())
        loss.backward()
        optimizer.step()
        messages.append([float(one).hex() for one in (*sums, *halo)])
        job.line(tp.updates, loss, samples=digest(indices))
    job.note(messages=messages)
    job.final(model, optimizer)


def backward(job: Reported) -> None:
    """Many small buckets; ranks die inside a backward pass. After all failures a group is made and used."""
    net = Net()
    net.second = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    model = DDP(net, bucket_cap_mb=0.0005)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tp = tpwrap.session(model=model, optimizer=optimizer)
    late: Any = None

    def in_the_middle(gradient: torch.Tensor) -> None:
        if tp.updates == 0:
            job.killed(1, "first-backward")
        if tp.updates == 4:
            job.killed(2, "later-backward")

    net.second[4].weight.register_hook(in_the_middle)
    for indices, inputs, targets in tp.batches(sharded()):
        if tp.updates >= LATE and late is None:
            late = dist.new_group([0, 1, 2])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if late is not None:
            dist.all_reduce(total, group=late)
        job.line(tp.updates, loss, samples=digest(indices), total=float(total).hex())
    job.note(store=[os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]])
    job.final(model, optimizer)
    dist.barrier(group=late)
    dist.destroy_process_group()


def saved(job: Reported) -> None:
    """A model in two shards with two replicas each; every second step all ranks save their shards."""
    torch.manual_seed(0)
    model = wrapped("hsdp")
    torch.manual_seed(job.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tp = tpwrap.session(model=model, optimizer=optimizer)

    def in_the_middle(*_: Any) -> None:
        if tp.updates == 3:
            job.killed(1, "forward")

    model.norm.register_forward_hook(in_the_middle)
    shards: dict[str, torch.Tensor] = {}
    for indices, inputs, targets in tp.batches(sharded()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        shards = {name: local(value).clone() for name, value in model.state_dict().items()}
        job.line(tp.updates, loss, samples=digest(indices), shards=digest(shards))
        if tp.updates % 2 == 0:
            path = job.out / f"checkpoint-{tp.updates}-{job.rank}.pt"
            torch.save({"step": tp.updates, "shards": shards}, path.with_suffix(".part"))
            if tp.updates == 6:
                job.killed(0, "saving")
            path.with_suffix(".part").replace(path)
    stand_in = nn.Linear(1, 1)  # shards have no digest of their own in the result files
    nn.init.zeros_(stand_in.weight), nn.init.zeros_(stand_in.bias)
    job.final(stand_in, torch.optim.SGD(stand_in.parameters()), shards=digest(shards))


CASES: dict[str, Callable[[Reported], None]] = {
    case.__name__: case for case in (scaled, accumulated, communicating, backward, saved)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--die", action="append", default=[], metavar="PLACE")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=PATIENCE)
    torch.manual_seed(dist.get_rank())
    CASES[args.case](Reported(args.out, args.die))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

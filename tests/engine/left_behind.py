"""A training script in which an operation of a given-up communicator does not end.

Ranks 0 and 2 share a group whose first gloo backend does not hear the order to abort. In each step rank 0 issues an
all-reduce there long before rank 2 does, so that one is in flight whenever rank 1 dies in backward. It is gloo's own
operation, on gloo's own connections: only the cut is left out, as if it had had no effect.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import tpwrap
from tests.e2e.scripts.variants import Job, Net, digest, sharded
from tpwrap.engine import communicators
from tpwrap.engine.inner import GlooInner, Inner, Place

PAIR = (0, 2)
_alive: list[Any] = []
"""the deaf backends: one that was destroyed on rank 2 would close the connections, and end the operation on rank 0"""


class Deaf(GlooInner):
    def create(self, place: Place) -> Any:
        _alive.append(super().create(place))
        return _alive[-1]

    def abort(self) -> None:
        self.aborted.set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    new_inner = communicators.Communicator.new_inner

    def first_is_deaf(communicator: communicators.Communicator) -> Inner:
        deaf = communicator.group.size == len(PAIR) and communicator.generation < 0
        return Deaf(communicators._RealGloo) if deaf else new_inner(communicator)

    communicators.Communicator.new_inner = first_is_deaf  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    job = Job(args.out, die=False)
    torch.manual_seed(job.rank)
    pair = dist.new_group(list(PAIR))
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tp = tpwrap.session(model=model, optimizer=optimizer)
    for indices, inputs, targets in tp.batches(sharded()):
        shared = inputs.sum()
        early = dist.all_reduce(shared, group=pair, async_op=True) if job.rank == 0 else None
        dist.barrier()  # so that it is in flight when rank 1 comes to its end
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        if early is not None:
            early.wait()
        elif job.rank in PAIR:
            dist.all_reduce(shared, group=pair)
        optimizer.step()
        # What is computed before optimizer.step() is not restored on a newcomer: of rank 1, log the loss alone.
        job.line(tp.updates, loss, samples=digest(indices), shared=float(shared).hex() if job.rank in PAIR else "")
    job.final(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

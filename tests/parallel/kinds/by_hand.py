"""Data parallel with the script's own communication: a ring of messages, objects and barriers, groups that are made in
the middle, and operations that are under way across steps."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.kinds.base import Trainee, average_gradients
from tests.parallel.kinds.replicated import Replicated
from tests.parallel.parts import Net, Options


def ring_average(tensor: torch.Tensor) -> None:
    """An all-reduce of pieces that go round: first summed, then spread."""
    rank, world = dist.get_rank(), dist.get_world_size()
    flat = tensor.reshape(-1)
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % world)])
    pieces = list(padded.chunk(world))

    def pass_on(sending: int, receiving: int) -> torch.Tensor:
        arrived = torch.empty_like(pieces[receiving])
        operations = [
            dist.P2POp(dist.isend, pieces[sending].clone(), (rank + 1) % world),
            dist.P2POp(dist.irecv, arrived, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return arrived

    for turn in range(world - 1):
        place = (rank - turn - 1) % world
        pieces[place] += pass_on((rank - turn) % world, place)
    for turn in range(world - 1):
        place = (rank - turn) % world
        pieces[place].copy_(pass_on((rank - turn + 1) % world, place))
    tensor.copy_(torch.cat(pieces)[: len(flat)].view_as(tensor) / world)


class Ring(Trainee):
    def __init__(self, options: Options) -> None:
        super().__init__(options, Net(options))

    def finish(self, step: int) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        joined = torch.cat([g.reshape(-1) for g in gradients])
        ring_average(joined)
        for gradient, piece in zip(gradients, joined.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))


def ring(options: Options) -> Trainee:
    return Ring(options)


class LateGroups(Replicated):
    """A group for pairs of ranks from step 2 on, another one of all ranks from step 5 on; made when they are needed."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._pairs: Any = None
        self._all: Any = None

    def before(self, step: int) -> None:
        if step >= 2 and self._pairs is None:
            self._pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        if step >= 5 and self._all is None:
            self._all = dist.new_group([3, 2, 1, 0])

    def finish(self, step: int) -> None:
        if self._pairs is not None:
            gradient = next(p.grad for p in self.model.parameters() if p.grad is not None)
            dist.all_reduce(gradient, group=self._pairs[dist.get_rank() in (1, 2)])
            dist.all_reduce(gradient)
            gradient /= 8

    def after(self, step: int) -> dict[str, Any]:
        if self._all is None:
            return {}
        total = torch.tensor([float(dist.get_rank() + step)])
        dist.all_reduce(total, group=self._all)
        return {"total": float(total)}


def late_groups(options: Options) -> Trainee:
    return LateGroups(options)


class Talkative(Trainee):
    """Objects, scalars and barriers around the update, as trainers do for their logs and checks."""

    def __init__(self, options: Options) -> None:
        super().__init__(options, Net(options))

    def before(self, step: int) -> None:
        dist.barrier()

    def finish(self, step: int) -> None:
        facts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(facts, {"rank": dist.get_rank(), "text": "x" * (step + dist.get_rank())})
        average_gradients(self.model)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))

    def after(self, step: int) -> dict[str, Any]:
        told: list[Any] = [{"step": step, "from": 1} if dist.get_rank() == 1 else None]
        dist.broadcast_object_list(told, src=1)
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(("rank", dist.get_rank(), step), gathered, dst=0)
        share: list[Any] = [None]
        dist.scatter_object_list(share, [step * 10 + i for i in range(4)] if dist.get_rank() == 2 else None, src=2)
        dist.barrier()
        return {"told": told, "gathered": gathered, "share": share}


def objects(options: Options) -> Trainee:
    return Talkative(options)


class HeldAfter(Replicated):
    """The mean of a value is asked for after the update, and waited for in the next step, where it changes the loss."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._work: Any = None
        self._mean = torch.zeros(1)

    def before(self, step: int) -> None:
        if self._work is not None:
            self._work.wait()

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().loss(inputs, targets) * (1 + 0.01 * float(self._mean))

    def after(self, step: int) -> dict[str, Any]:
        self._ask(step)
        return {}

    def _ask(self, step: int) -> None:
        self._mean = torch.tensor([float(dist.get_rank() + step)])
        self._work = dist.all_reduce(self._mean, async_op=True)


def held_after(options: Options) -> Trainee:
    return HeldAfter(options)


class HeldBefore(HeldAfter):
    """The same, asked for before the update."""

    def finish(self, step: int) -> None:
        self._ask(step)

    def after(self, step: int) -> dict[str, Any]:
        return {}


def held_before(options: Options) -> Trainee:
    return HeldBefore(options)

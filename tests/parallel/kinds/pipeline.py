"""Pipeline parallel x data parallel: two stages on two replicas, or (interleaved) two stages a rank."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.parallel.kinds.base import Trainee, average_gradients
from tests.parallel.parts import BATCH, HIDDEN, LENGTH, WIDTH, Net, Options

MICROBATCHES = 2
CPU = torch.device("cpu")


def split(net: Net, parts: int) -> list[nn.Sequential]:
    """The net in `parts` modules that are run one after another."""
    layers = [net.stem, *net.blocks, net.head]
    cuts = [len(layers) * i // parts for i in range(parts + 1)]
    return [nn.Sequential(*layers[low:high]) for low, high in itertools.pairwise(cuts)]


class Pipelined(Trainee):
    def __init__(self, options: Options, mesh: DeviceMesh, stages: dict[int, nn.Module], count: int) -> None:
        super().__init__(options, next(iter(stages.values())) if len(stages) == 1 else nn.ModuleList(stages.values()))
        self.data_rank, self.data_world = mesh["dp"].get_local_rank(), mesh["dp"].size()
        self.mesh, self.stages, self.count = mesh, stages, count
        self.schedule: Any = None

    def pipeline(self, schedule: Any, shapes: bool = False) -> Pipelined:
        """Make the stages. shapes: given by us, not found out by messages in the first pass."""
        group = self.mesh["pp"].get_group()
        made = [
            PipelineStage(module, i, self.count, CPU, group=group, **(self._shapes(i) if shapes else {}))
            for i, module in self.stages.items()
        ]
        several = issubclass(schedule, ScheduleInterleaved1F1B)
        self.schedule = schedule(made if several else made[0], MICROBATCHES, loss_fn=self._loss)
        return self

    def _shapes(self, stage: int) -> dict[str, Any]:
        rows = BATCH // MICROBATCHES
        between = torch.empty(rows, LENGTH, HIDDEN, dtype=self.options.dtype, requires_grad=True)
        first = torch.empty(rows, LENGTH, WIDTH, dtype=self.options.dtype)
        inputs = first if stage == 0 else between
        with torch.no_grad():
            outputs = between if stage < self.count - 1 else self.stages[stage](torch.zeros_like(inputs))
        return {"input_args": inputs, "output_args": outputs}

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.float(), targets) / self.options.accumulation

    def run(self, inputs: torch.Tensor, targets: torch.Tensor, last: bool) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        given = (inputs,) if 0 in self.stages else ()
        with self.options.autocast():
            if self.count - 1 in self.stages:
                self.schedule.step(*given, target=targets, losses=losses)
            else:
                self.schedule.step(*given)
        return losses

    def finish(self, step: int) -> None:
        average_gradients(self.model, self.mesh["dp"].get_group())


def two_by_two() -> DeviceMesh:
    """The ranks of a replica are 0 and 2, or 1 and 3."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def two_stages(options: Options, wrap: Any = lambda module, mesh: module) -> Pipelined:
    mesh = two_by_two()
    place = mesh["pp"].get_local_rank()
    return Pipelined(options, mesh, {place: wrap(split(Net(options), 2)[place], mesh)}, 2)


def pp_gpipe(options: Options) -> Trainee:
    return two_stages(options).pipeline(ScheduleGPipe)


def pp_1f1b(options: Options) -> Trainee:
    return two_stages(options).pipeline(Schedule1F1B, shapes=True)


def pp_interleaved(options: Options) -> Trainee:
    mesh = two_by_two()
    place = mesh["pp"].get_local_rank()
    parts = split(Net(options, blocks=4), 4)
    return Pipelined(options, mesh, {i: parts[i] for i in (place, place + 2)}, 4).pipeline(ScheduleInterleaved1F1B)


class PipelinedDDP(Pipelined):
    """The schedule itself says at which micro-batch DDP is to reduce."""

    def finish(self, step: int) -> None:
        pass


def pp_ddp(options: Options) -> Trainee:
    mesh = two_by_two()
    place = mesh["pp"].get_local_rank()
    stage = DDP(split(Net(options), 2)[place], process_group=mesh["dp"].get_group(), bucket_cap_mb=0.001)
    return PipelinedDDP(options, mesh, {place: stage}, 2).pipeline(Schedule1F1B, shapes=True)

"""What all kinds of training in this folder are made of: data, modules, optimizers, schedulers, result files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

EPOCHS, WINDOWS = 2, 5
"""a window is what leads to one update (or to none, where a scaler skips it): one batch, or several"""
BATCH, LENGTH, WIDTH, HIDDEN, CLASSES = 4, 4, 6, 8, 5
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """One configuration of training: everything but the failure. The values are those of `facts.FACTORS`."""

    kind: str
    optimizer: str = "sgd"
    precision: str = "fp32"
    accumulation: int = 1
    loader: str = "sampler"
    scheduler: str = "none"
    way: str = "replay"
    """redo: the script says that its steps may run again"""
    extra: str = "none"

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and inputs."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "autocast":
            return torch.autocast("cpu", torch.bfloat16)
        return torch.autocast("cpu", torch.float16) if self.precision == "scaler" else contextlib.nullcontext()


# --- modules ------------------------------------------------------------------------------------------


class Stem(nn.Module):
    """The part that no kind cuts into pieces; `extra` puts into it what has a state of its own."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, HIDDEN)
        spectral = options.extra == "spectral"
        self.linear = torch.nn.utils.parametrizations.spectral_norm(linear) if spectral else linear
        self.norm: nn.Module = nn.BatchNorm1d(HIDDEN) if options.extra == "batchnorm" else nn.Identity()
        self.dropout = nn.Dropout(0.3 if options.extra == "dropout" else 0.0)
        if options.extra == "late_group":
            self.late = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(inputs).flatten(0, 1)).view(*inputs.shape[:2], HIDDEN)
        hidden = self.dropout(hidden)
        return hidden * self.late if hasattr(self, "late") else hidden


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(F.relu(self.up(self.norm(hidden))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, CLASSES)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden.mean(1))


class Net(nn.Module):
    """Inputs of shape (batch, LENGTH, WIDTH) to CLASSES logits."""

    def __init__(self, options: Options, blocks: int = 2) -> None:
        super().__init__()
        self.stem = Stem(options)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = Head()
        self.to(options.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


# --- data ---------------------------------------------------------------------------------------------


class Samples(Dataset[Batch]):
    """Map-style; noisy: augmented from the global generators of the process that fetches."""

    def __init__(self, count: int, dtype: torch.dtype, noisy: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(count, LENGTH, WIDTH, generator=generator).to(dtype)
        self.targets = torch.randint(0, CLASSES, (count,), generator=generator)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        inputs = self.inputs[index]
        if self.noisy:
            inputs = inputs + 0.1 * torch.randn_like(inputs) + 0.1 * random.random()
        return torch.tensor(index), inputs, self.targets[index]


class Stream(IterableDataset[Batch]):
    """Iterable: a rank's part of the samples, with the position that it has come to."""

    def __init__(self, samples: Samples, rank: int, world: int) -> None:
        self.samples, self.rank, self.world = samples, rank, world
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self.samples) // self.world):
            yield self.samples[(self.rank + self.world * self.position) % len(self.samples)]
            self.position += 1


def loader(options: Options, rank: int, world: int) -> DataLoader[Batch]:
    """One pass is WINDOWS windows of the samples for data rank `rank` of `world`."""
    per_rank = WINDOWS * options.accumulation * BATCH
    if options.loader == "map":  # an order of its own on each data rank, from the global generator
        return DataLoader(Samples(per_rank, options.dtype), BATCH, shuffle=True)
    samples = Samples(per_rank * world, options.dtype, noisy=options.loader == "workers")
    if options.loader == "iterable":
        return DataLoader(Stream(samples, rank, world), BATCH)
    sampler = DistributedSampler(samples, world, rank)
    if options.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(samples, BATCH, sampler=sampler)
    return DataLoader(samples, BATCH, sampler=sampler, num_workers=2 if options.loader == "workers" else 0)


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


# --- optimizers, schedulers ---------------------------------------------------------------------------


def optimizer(options: Options, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    make = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adamw_foreach": lambda: torch.optim.AdamW(parameters, lr=0.02, foreach=True),
        "adamw_fused": lambda: torch.optim.AdamW(parameters, lr=0.02, fused=True),
        "adam_tensor_lr": lambda: torch.optim.Adam(parameters, lr=torch.tensor(0.02)),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.05),
    }
    return make[options.optimizer]()


def scheduler(options: Options, optimizer: torch.optim.Optimizer) -> Any:
    from torch.optim import lr_scheduler as of

    if options.scheduler == "cosine":
        return of.CosineAnnealingLR(optimizer, EPOCHS * WINDOWS)
    if options.scheduler == "plateau":
        return of.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
    if options.scheduler == "sequential":
        parts = [of.LinearLR(optimizer, 0.2, total_iters=3), of.ExponentialLR(optimizer, 0.8)]
        return of.SequentialLR(optimizer, parts, milestones=[3])
    if options.scheduler == "chained":
        return of.ChainedScheduler([of.StepLR(optimizer, 3), of.ExponentialLR(optimizer, 0.9)], optimizer)
    return None


class Average:
    """A moving average of this rank's part of the parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self.values = [local(parameter).detach().clone() for parameter in parameters]

    def update(self) -> None:
        for mine, parameter in zip(self.values, self._parameters, strict=True):
            mine.lerp_(local(parameter).detach(), 0.3)

    def get(self) -> list[torch.Tensor]:
        return self.values

    def set(self, values: list[torch.Tensor]) -> None:
        for mine, new in zip(self.values, values, strict=True):
            mine.copy_(new)


# --- results ------------------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it is on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = local(value.detach()).contiguous()
        return hashlib.sha256(value.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:24]
    if isinstance(value, dict):
        value = sorted((str(key), digest(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        value = [digest(item) for item in value]
    return hashlib.sha256(repr(value).encode()).hexdigest()[:24]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of this rank, whatever its `state_dict()` would gather."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {"groups": groups, "state": [dict(optimizer.state.get(parameter, {})) for parameter in parameters]}


def random_states() -> dict[str, str]:
    _, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": digest(random.getstate()),
        "numpy": digest([keys.tolist(), position, has_gauss, gauss]),
        "torch": digest(torch.get_rng_state()),
    }


class Results:
    """The result files of one rank, as `tpwrap.report.compare` reads them."""

    def __init__(self, out: Path) -> None:
        self.out, self.rank = out, dist.get_rank()
        self._world_group = dist.group.WORLD
        out.mkdir(parents=True, exist_ok=True)
        self._log = os.open(out / f"rank{self.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def line(self, step: int, **fields: Any) -> None:
        os.write(self._log, (json.dumps({"step": step, **fields}) + "\n").encode())

    def final(self, **fields: Any) -> None:
        same = dist.group.WORLD is self._world_group
        fields |= {"pid": os.getpid(), "objects": "ok" if same else "replaced"}
        (self.out / f"final{self.rank}.tmp").write_text(json.dumps(fields) + "\n")
        os.replace(self.out / f"final{self.rank}.tmp", self.out / f"final{self.rank}.json")

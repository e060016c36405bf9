"""One training script for every kind of parallelism in this folder, with the two lines of tpwrap.

Runs under `tpwrap`, and as it is with one process a rank (RANK and WORLD_SIZE in the environment).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist

import tpwrap
from tests.parallel import kinds, parts
from tests.parallel.kinds.base import Trainee
from tests.parallel.parts import Options


def augmented(inputs: torch.Tensor) -> torch.Tensor:
    """With noise from each global generator."""
    noise = 0.1 * torch.randn_like(inputs)
    return inputs + noise + 0.1 * random.gauss(0.0, 1.0) + 0.1 * float(np.random.standard_normal())


def train(options: Options, trainee: Trainee, results: parts.Results) -> None:
    optimizer = trainee.optimizer()
    scheduler = parts.scheduler(options, optimizer)
    loader = parts.loader(options, trainee.data_rank, trainee.data_world)
    average = parts.Average(trainee.all) if options.extra == "ema" else None
    history: list[Any] = []

    tp = tpwrap.session(model=trainee.model, optimizer=optimizer, scheduler=scheduler, shard=trainee.shard)
    tp.register("history", lambda: list(history), lambda value: history.__setitem__(slice(None), value))
    if average is not None:
        tp.register("average", average.get, average.set)

    for epoch in tp.epochs(parts.EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for indices, inputs, targets in tp.batches(loader):
            with tp.step() if options.way == "redo" else contextlib.nullcontext():
                place = tp.batch_index % options.accumulation
                if place == 0:
                    roots: list[torch.Tensor] = []
                    seen: list[torch.Tensor] = []
                    trainee.before(tp.updates)
                    if options.extra == "late_group" and tp.updates >= 3 and len(optimizer.param_groups) == 1:
                        optimizer.add_param_group({"params": trainee.late_parameters(), "lr": 0.01})
                last = place == options.accumulation - 1
                roots += trainee.run(augmented(inputs), targets, last)
                seen.append(indices)
                if last and updated(options, trainee, optimizer, tp):
                    if scheduler is not None:
                        scheduler.step(*measured(options, roots))
                    if average is not None:
                        average.update()
                    history.append((tp.updates, [root.item() for root in roots]))
                    results.line(
                        tp.updates,
                        loss=[root.item().hex() for root in roots],
                        samples=parts.digest(torch.cat(seen)),
                        weights=parts.digest(trainee.all),
                        lr=[float(group["lr"]).hex() for group in optimizer.param_groups],
                        scale=trainee.scaler.get_scale(),
                        **trainee.after(tp.updates),
                    )

    results.final(
        weights=parts.digest(trainee.all),
        buffers=parts.digest(dict(trainee.model.named_buffers())),
        optimizer=parts.digest(parts.optimizer_state(optimizer)),
        scheduler=parts.digest({} if scheduler is None else told(scheduler.state_dict())),
        scaler=parts.digest(trainee.scaler.state_dict()),
        average=parts.digest([] if average is None else average.values),
        history=parts.digest(history),
        length=len(history),
        random=parts.random_states(),
    )


def updated(options: Options, trainee: Trainee, optimizer: torch.optim.Optimizer, tp: Any) -> bool:
    """The end of a window; False where the scaler has skipped the update."""
    before = tp.updates
    trainee.finish(before)
    if options.extra == "clip":
        trainee.scaler.unscale_(optimizer)
        trainee.clip()
    trainee.scaler.step(optimizer)
    trainee.scaler.update()
    for parameter in trainee.all:  # of which some may be in no group yet
        parameter.grad = None
    return tp.updates > before


def measured(options: Options, roots: list[torch.Tensor]) -> tuple[float, ...]:
    """What a ReduceLROnPlateau follows: a loss that all ranks know, made after the update."""
    if options.scheduler != "plateau":
        return ()
    total = torch.tensor([float(sum(root.item() for root in roots)), float(len(roots))], dtype=torch.float64)
    dist.all_reduce(total)
    return (float(total[0] / total[1]),)


def told(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without the objects in it."""
    return {
        key: [told(part.state_dict()) for part in value] if key == "_schedulers" and hasattr(value[0], "state_dict")
        else [told(part) for part in value] if key == "_schedulers" else value
        for key, value in state.items()
        if not callable(value)
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(Options):
        kind = int if field.name == "accumulation" else str
        default = None if field.default is dataclasses.MISSING else field.default
        parser.add_argument(f"--{field.name}", type=kind, default=default, required=field.name == "kind")
    parser.add_argument("--out", type=Path, required=True)
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    options = Options(**given)
    if "TPWRAP_TESTS_LEFT_OUT" in os.environ:
        from tests.parallel import left_out

        left_out.apply(os.environ["TPWRAP_TESTS_LEFT_OUT"])
    dist.init_process_group("gloo")
    parts.seed(1)  # the same model everywhere
    trainee = kinds.trainee(options)
    parts.seed(100 + trainee.data_rank)
    train(options, trainee, parts.Results(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

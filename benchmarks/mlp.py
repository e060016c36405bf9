"""The training script of the benchmarks: a multilayer perceptron that runs the same under tpwrap and torchrun, with DDP
or HSDP (FSDP2 on a mesh of 2 x 2).

Every rank writes a line `step time` to OUT/times<rank>.txt when an update is applied (seconds since the epoch),
and at the end the CPU milliseconds it took per step to OUT/cpu<rank>.txt. Under
torchrun it can kill its own rank (`--kill-step`, first attempt only) in the middle of backward, and resumes from its
last checkpoint, as a script must that torchrun restarts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from benchmarks.model import batches, network

KILLED = 1
"""the rank that dies"""
WARM_UP = 20
"""steps that do not count"""


def sharded(net: torch.nn.Sequential) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for module in net:
        if isinstance(module, torch.nn.Linear):
            fully_shard(module, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--width", type=int, default=384, help="384: 4.7 MB of parameters; 768: 19 MB")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint-every", type=int, default=0, help="0: never")
    parser.add_argument("--kill-step", type=int, default=-1)
    parser.add_argument("--hsdp", action="store_true", help="shard over two ranks, replicate over two pairs")
    parser.add_argument("--redo", action="store_true", help="steps are run again after a failure if they do not fit")
    parser.add_argument("--as-is", action="store_true", help="without the two lines")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    args.out.mkdir(parents=True, exist_ok=True)
    net = network(args.width, args.layers)
    model = sharded(net) if args.hsdp else DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    done = 0
    checkpoint = args.out / "checkpoint.pt"
    if args.checkpoint_every and checkpoint.exists():
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    if args.kill_step >= 0 and rank == KILLED and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":

        def die(_: torch.Tensor) -> None:
            if step == args.kill_step:
                (args.out / "killed.txt").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        parameters = list(net.parameters())
        parameters[len(parameters) // 2].register_hook(die)
    data = batches(rank, args.width, args.batch_size)
    numbers = [data[i % 8] for i in range(done, args.steps)]
    step = done
    if not args.as_is:
        # Not an import statement: a script that has one is not taken as it is.
        tp = importlib.import_module("tpwrap").session(model=model, optimizer=optimizer)
        numbers = tp.batches(numbers)
    cpu = 0.0
    log = os.open(args.out / f"times{rank}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def train(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = (model(batch) - batch).pow(2).mean()
        loss.backward()
        optimizer.step()

    if args.redo:
        train = tp.step(train)
    for batch in numbers:
        train(batch)
        step = step + 1 if args.as_is else done + tp.updates
        os.write(log, f"{step} {time.time()!r}\n".encode())
        if step - done == WARM_UP:
            cpu = time.process_time()
        if args.checkpoint_every and step % args.checkpoint_every == 0 and rank == 0:
            saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, args.out / "new.pt")
            os.replace(args.out / "new.pt", checkpoint)
    if step - done > WARM_UP:
        spent = 1000 * (time.process_time() - cpu) / (step - done - WARM_UP)
        (args.out / f"cpu{rank}.txt").write_text(repr(spent))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

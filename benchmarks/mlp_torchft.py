"""`mlp.py` under torchft: one process is one replica group. Needs torch and torchft, and nothing of tpwrap.

Writes OUT/times<rank>.txt as mlp.py does, a line for each update that was committed; and OUT/lost<rank>.json: how many
batches of this group were thrown away, and how many updates had fewer groups, once all had been there. The group KILLED
kills itself in the middle of the backward pass of `--kill-step`, once.

Gradients are averaged by `Manager.allreduce`, all in one after backward. torchft 0.2.0's own DistributedDataParallel
does not get over a peer that dies within an all-reduce, at least not on gloo: its communication hook asserts that the
failed operation has a future, which was never set, so that the AssertionError ends the backward pass of every survivor.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.model import batches, network

GROUPS = 4
KILLED = 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-step", type=int, required=True)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    net = network(args.width, args.layers)
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=lambda s: (net.load_state_dict(s["model"]), inner.load_state_dict(s["optimizer"])),
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"group{args.rank}",
    )
    optimizer = Optimizer(manager, inner)
    parameters = list(net.parameters())
    if args.rank == KILLED and not (args.out / "killed.txt").exists():

        def die(_: torch.Tensor) -> None:
            if manager.current_step() == args.kill_step:
                (args.out / "killed.txt").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        parameters[len(parameters) // 2].register_hook(die)
    data = batches(args.rank, args.width, args.batch_size)
    log = os.open(args.out / f"times{args.rank}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    number = dropped = fewer = 0
    complete = False
    while manager.current_step() < args.steps:
        batch = data[number % 8]
        number += 1
        before = manager.current_step()
        optimizer.zero_grad()
        (net(batch) - batch).pow(2).mean().backward()
        gradients = [parameter.grad for parameter in parameters]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        manager.allreduce(flat).wait()  # an error is kept by the manager, and the step then dropped
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        optimizer.step()
        step = manager.current_step()
        if step > before:
            os.write(log, f"{step} {time.time()!r}\n".encode())
        complete = complete or manager.num_participants() == GROUPS
        dropped += complete and step == before
        fewer += complete and step > before and manager.num_participants() < GROUPS
    (args.out / f"lost{args.rank}.json").write_text(json.dumps({"dropped": dropped, "fewer": fewer}))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()

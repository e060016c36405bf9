"""How fast does state move from replicas to a newcomer? Beside raw TCP between the same processes, in paired runs.

    python -m benchmarks.transfer [--mb 1024] [--pairs 5] [--json FILE]

All on this machine, over the loopback device: sources are processes with a state server, the newcomer is this process.
*Raw*: each source sends its share from one large buffer over one connection that stands already (`sendall`), and the
newcomer receives it into the memory in which the state lives. *Restore*: the engine's `restore`, from the first
connection to the last digest. Every byte of the state differs, and moves. The figure that counts is restore / raw, pair
by pair, in three ways:

* *restore*: as in a job, where the sources have taken their digests while the newcomer ran the script's set-up;
* *cold*: the sources take them at the same time (a newcomer that asks again after a failure in a recovery);
* *no digests*: what is left when nothing is digested anywhere, for comparison.

*CPU* is the same ratio of what does not depend on what else the machine does: processor time of raw TCP over that of
restore, of all processes together. With processors enough, the first ratio is higher; on a crowded machine, about this.

Few large tensors are 128 MB each, ordinary ones 1 MB, many small ones 64 kB. Restore has two connections to a source,
raw one: what is digested over one is hidden behind the other if there are processors for it. With two of them, which
sender and receiver share, it is not. Memory is touched before it is measured: where a newcomer's optimizer state is
allocated on arrival, the system's work for fresh pages comes on top, for raw TCP as for `restore`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tpwrap.engine import _native, transfer
from tpwrap.engine.state import ReplicaState
from tpwrap.engine.transfer import Offer, StateServer

KEY = b"k" * 32
CHUNK = 4 << 20
LAYOUTS = {"few large": 128 << 20, "ordinary": 1 << 20, "many small": 64 << 10}
"""bytes of each tensor"""
WAYS = ["restore", "cold", "no digests"]
_digests = _native.digests


class Memory:
    """One touched buffer, and the tensors in it."""

    def __init__(self, nbytes: int, fill: int) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8).fill_(fill)
        self.view: memoryview = self.bytes.numpy().data

    def state(self, layout: str) -> ReplicaState:
        parts = self.bytes.split(LAYOUTS[layout])
        tensors = {f"t{i}": part for i, part in enumerate(parts)}
        return ReplicaState.of({}, {}, {}, lambda: tensors)


def digesting(way: str) -> None:
    # Not "": with that a newcomer asks for what differs.
    _native.digests = _digests if way != "no digests" else lambda tensors: ["-"] * len(tensors)


def source(pipe: Connection, nbytes: int) -> None:
    """The process of a source. Told ("raw", first, last), it sends these bytes; else it offers its state."""
    torch.set_num_threads(1)
    memory = Memory(nbytes, 1)
    server = StateServer("127.0.0.1", KEY)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((server.address, listener.getsockname()))
        raw, _ = listener.accept()
    threading.Thread(target=send_raw, args=(raw, memory.view), daemon=True).start()
    while order := pipe.recv():
        if order == "cpu":
            pipe.send(time.process_time())
            continue
        generation, layout, way = order
        state = memory.state(layout)
        digesting(way)
        offer = Offer(generation, 0, state, state.scalars())
        if way != "cold":
            offer.digests()
        server.offer(offer)
        pipe.send("offered")
        offer.digests()  # for its own report, as in a job


def send_raw(connection: socket.socket, view: memoryview) -> None:
    while asked := connection.recv(16, socket.MSG_WAITALL):
        first, last = struct.unpack("<QQ", asked)
        for at in range(first, last, CHUNK):
            connection.sendall(view[at : min(at + CHUNK, last)])


class Sources:
    def __init__(self, count: int, nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._raw: list[socket.socket] = []
        self.addresses: list[str] = []
        for _ in range(count):
            mine, other = context.Pipe()
            context.Process(target=source, args=(other, nbytes), daemon=True).start()
            self._pipes.append(mine)
        for pipe in self._pipes:
            address, raw = pipe.recv()
            self.addresses.append(address)
            self._raw.append(socket.create_connection(raw))

    def receive_raw(self, count: int, view: memoryview) -> None:
        """From `count` of them, into `view`."""
        share = -(-len(view) // count)

        def receive(connection: socket.socket, first: int, last: int) -> None:
            connection.sendall(struct.pack("<QQ", first, last))
            while first < last:
                first += connection.recv_into(view[first : min(first + CHUNK, last)], 0, socket.MSG_WAITALL)

        threads = [
            threading.Thread(target=receive, args=(one, i * share, min((i + 1) * share, len(view))))
            for i, one in enumerate(self._raw[:count])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def offer(self, count: int, generation: int, layout: str, way: str) -> None:
        for pipe in self._pipes[:count]:
            pipe.send((generation, layout, way))
        for pipe in self._pipes[:count]:
            pipe.recv()

    def cpu(self) -> float:
        """Seconds that their processes and this one have used."""
        for pipe in self._pipes:
            pipe.send("cpu")
        return time.process_time() + sum(pipe.recv() for pipe in self._pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


class Rate(NamedTuple):
    wall: float
    """GB/s"""
    cpu: float
    """GB for each second of any processor"""


def rate(sources: Sources, nbytes: int, move: Callable[[], object]) -> Rate:
    cpu, wall = sources.cpu(), time.perf_counter()
    move()
    wall = time.perf_counter() - wall
    return Rate(nbytes / 1e9 / wall, nbytes / 1e9 / (sources.cpu() - cpu))


def measure(sources: Sources, count: int, memory: Memory, layout: str, generation: int) -> dict[str, Rate]:
    """By way, once each."""
    nbytes = len(memory.view)
    found = {"raw": rate(sources, nbytes, lambda: sources.receive_raw(count, memory.view))}
    for i, way in enumerate(WAYS):
        memory.bytes.fill_(2)
        state = memory.state(layout)
        sources.offer(count, generation + i, layout, way)
        digesting(way)
        asked = (state, sources.addresses[:count], KEY, generation + i, 0, 60.0, lambda: False)
        moved: list[int] = []
        found[way] = rate(sources, nbytes, lambda: moved.append(transfer.restore(*asked)[1]))  # noqa: B023
        if moved != [nbytes] or not bool((memory.bytes == 1).all()):
            raise RuntimeError(f"{moved} bytes of {nbytes} have moved, or others than the source's")
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024, help="size of the state (default 1024)")
    parser.add_argument("--pairs", type=int, default=5, help="paired runs (default 5)")
    parser.add_argument("--sources", type=int, default=3, help="measure with 1 up to so many sources (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    nbytes = args.mb << 20
    memory = Memory(nbytes, 0)
    sources = Sources(args.sources, nbytes)
    cases = [(layout, count) for layout in LAYOUTS for count in range(1, args.sources + 1)]
    found: dict[tuple[str, int], list[dict[str, Rate]]] = {case: [] for case in cases}
    for pair in track(range(args.pairs), "paired runs", console=console):
        for i, (layout, count) in enumerate(cases):
            generation = (pair * len(cases) + i) * len(WAYS)
            found[layout, count].append(measure(sources, count, memory, layout, generation))
    sources.close()
    title = f"{args.mb} MB: restore / raw; median (min–max) of {args.pairs}"
    table = Table("tensors", "sources", "raw, GB/s", *WAYS, *(f"CPU, {way}" for way in WAYS), title=title)
    for (layout, count), runs in found.items():
        walls = [spread([run[way].wall / run["raw"].wall for run in runs]) for way in WAYS]
        cpus = [f"{statistics.median(run[way].cpu / run['raw'].cpu for run in runs):.2f}" for way in WAYS]
        table.add_row(layout, str(count), spread([run["raw"].wall for run in runs]), *walls, *cpus)
    console.print(table)
    if args.json:
        cases = [
            {"tensors": layout, "sources": count, "GB/s": [{way: run[way]._asdict() for way in run} for run in runs]}
            for (layout, count), runs in found.items()
        ]
        args.json.write_text(json.dumps({"mb": args.mb, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Inner backends: what a communicator of one generation is made of, and how it is aborted.

`GlooInner` runs on CPUs. `NcclInner` takes the same path on GPUs; it follows PyTorch's and NCCL's sources and the
notes in docs/limits.md, and has been compiled against but never run.
"""

from __future__ import annotations

import datetime as dt
import os
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d

from tpwrap.engine import sockets


@dataclass(frozen=True)
class Place:
    """One group of one generation: who we are in it, and the store under whose keys its members meet."""

    store: c10d.Store
    rank: int
    size: int
    connect_timeout: dt.timedelta
    operation_timeout: dt.timedelta


class Inner(Protocol):
    """An inner backend under construction or in use."""

    def create(self, place: Place) -> Any:
        """Connect to all members and return the c10d backend. Blocks. Raises RuntimeError; must end soon after
        `abort`."""
        ...

    def abort(self) -> None:
        """Make every pending and further operation fail at once, also a `create` in progress. Any thread."""
        ...


_creating = threading.Lock()
"""Listening sockets are told apart by what appears while one is made, so only one at a time."""


@dataclass
class GlooInner:
    """gloo. Its connections are known by their ends: each group has a listener of its own, whose address every member
    publishes, so a connection belongs to the group if it starts or ends at one of these."""

    factory: Any
    """torch's ProcessGroupGloo class (the engine has put its own constructor in that place)"""
    listeners: set[sockets.Address] = field(default_factory=set)
    aborted: threading.Event = field(default_factory=threading.Event)

    def create(self, place: Place) -> Any:
        with _creating:
            before = sockets.listeners()
            devices = self._devices()
            mine = sockets.listeners() - before
        self.listeners |= mine
        place.store.set(f"listeners/{place.rank}", " ".join(f"{host}|{port}" for host, port in sorted(mine)))
        options = self.factory._Options()
        options._devices = devices
        options._threads = 2 * len(devices)
        options._timeout = place.connect_timeout
        if self.aborted.is_set():
            raise RuntimeError("aborted")
        keys = [f"listeners/{rank}" for rank in range(place.size)]
        place.store.wait(keys, place.connect_timeout)
        for value in (place.store.get(key) for key in keys):
            for address in value.decode().split():
                host, _, port = address.rpartition("|")
                self.listeners.add((host, int(port)))
        backend = self.factory(place.store, place.rank, place.size, options)
        backend._set_default_timeout(place.operation_timeout)
        if self.aborted.is_set():
            self.abort()
            raise RuntimeError("aborted")
        return backend

    def _devices(self) -> list[Any]:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        if interfaces:
            return [self.factory.create_device(interface=name) for name in interfaces]
        return [self.factory.create_default_device()]

    def abort(self) -> None:
        self.aborted.set()
        sockets.cut(lambda local, remote: local in self.listeners or remote in self.listeners)


@dataclass
class NcclInner:
    """NCCL. Not run here (no GPU): written after PyTorch 2.13's ProcessGroupNCCL.

    After an abort `wait()` does not raise, so failure is known from the control plane alone; the aborted object is
    never destroyed or finalized by us while peers may be gone (NCCL >= 2.31.2 would wait for them), only dropped.
    """

    options: Any
    backend: Any = None
    aborted: threading.Event = field(default_factory=threading.Event)

    def create(self, place: Place) -> Any:
        from torch.distributed import ProcessGroupNCCL  # absent in CPU builds

        options = ProcessGroupNCCL.Options()
        options.is_high_priority_stream = self.options.is_high_priority_stream
        options.config = self.options.config
        options._timeout = place.operation_timeout
        options.global_ranks_in_group = self.options.global_ranks_in_group
        options.group_name = self.options.group_name
        self.backend = ProcessGroupNCCL(place.store, place.rank, place.size, options)
        # Eagerly, in the recovery's own time and under its deadline: a lazy init would run inside the user's step,
        # where a peer that dies meanwhile cannot be aborted around.
        self.backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        if self.aborted.is_set():
            self.abort()
            raise RuntimeError("aborted")
        return self.backend

    def abort(self) -> None:
        self.aborted.set()
        if self.backend is not None:
            self.backend.abort()


def abort_all(inners: list[Inner], deadline: float) -> bool:
    """Abort every communicator, in a thread, and say whether that ended within `deadline` seconds.

    All of them, also those without the dead rank: survivors that wait for a survivor would hang otherwise. NCCL's are
    aborted inside one group call, because one by one they can deadlock on each other's queued kernels
    (pytorch#119797, NVIDIA/nccl#1013); torch does this only for bare ProcessGroupNCCL objects, not behind a wrapper.
    """

    def run() -> None:
        nccl = [inner.backend for inner in inners if isinstance(inner, NcclInner) and inner.backend is not None]
        if nccl:
            nccl[0]._group_start()
        try:
            for inner in inners:
                inner.abort()
        finally:
            if nccl:
                nccl[0]._group_end()

    thread = threading.Thread(target=run, name="torchpass-abort", daemon=True)
    thread.start()
    thread.join(deadline)
    return not thread.is_alive()


def probe(backend: Any, rank: int, size: int, device: torch.device) -> None:
    """One small all-reduce with a known answer. RuntimeError when the communicator computes something else."""
    value = torch.tensor([rank + 1], dtype=torch.int64, device=device)
    backend.allreduce([value], c10d.AllreduceOptions()).wait()
    expected = size * (size + 1) // 2
    if int(value.item()) != expected:
        raise RuntimeError(f"probe of a new communicator gave {int(value.item())} instead of {expected}")

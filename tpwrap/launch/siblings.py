"""Under srun with one task a rank: the first task of a node runs the whole node, its siblings hold their places.

They tell the first one which processors and devices Slurm has bound them to, stay as long as it does (Slurm keeps a
task's resources while it lives), and end with its exit code.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path

from tpwrap.core import signals

_RETRY = 0.1
_DEVICES = "CUDA_VISIBLE_DEVICES"


class Place:
    """What a task is bound to. cpus: processor numbers. devices: its CUDA_VISIBLE_DEVICES."""

    def __init__(self, local_id: int, cpus: list[int], devices: str | None) -> None:
        self.local_id = local_id
        self.cpus = cpus
        self.devices = devices

    @staticmethod
    def of_this_task(local_id: int) -> Place:
        return Place(local_id, sorted(os.sched_getaffinity(0)), os.environ.get(_DEVICES))


def cpus_by_slot(places: list[Place]) -> list[list[int]]:
    """For each slot the processors of its task; empty where all are bound alike."""
    ordered = sorted(places, key=lambda place: place.local_id)
    if len({tuple(place.cpus) for place in ordered}) == 1:
        return []
    return [place.cpus for place in ordered]


def all_devices(places: list[Place]) -> str | None:
    """CUDA_VISIBLE_DEVICES for every rank of the node, so that LOCAL_RANK chooses among them as under torchrun.

    None where it should stay as it is: not set, the same for all, or counted anew in each task (a device cgroup
    a task), where nobody can see the devices of another.
    """
    ordered = [place.devices for place in sorted(places, key=lambda place: place.local_id)]
    if None in ordered or len(set(ordered)) == 1:
        return None
    names = [name for devices in ordered if devices for name in devices.split(",")]
    return ",".join(names) if len(set(names)) == len(names) else None


class Door:
    """The first task's side: siblings come in, and are let go at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writers: list[asyncio.StreamWriter] = []
        self._places: asyncio.Queue[Place] = asyncio.Queue()
        self._server: asyncio.Server | None = None

    async def places(self, siblings: int, within: float) -> list[Place]:
        """Open, and wait until all siblings have come in; fewer after `within` seconds."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._enter, self._path)
        found: list[Place] = []
        deadline = asyncio.get_running_loop().time() + within
        while len(found) < siblings:
            left = deadline - asyncio.get_running_loop().time()
            try:
                found.append(await asyncio.wait_for(self._places.get(), left))
            except asyncio.TimeoutError:
                break
        return found

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            said = json.loads(await reader.readline())
            self._places.put_nowait(Place(said["local_id"], said["cpus"], said["devices"]))
        except (ValueError, KeyError, TypeError):
            writer.close()
            return
        self._writers.append(writer)
        await reader.read()  # until the sibling ends, or we do

    async def close(self, exit_code: int) -> None:
        """Let all siblings end with `exit_code`."""
        for writer in self._writers:
            writer.write(bytes([exit_code & 0xFF]))
            writer.close()
        for writer in self._writers:
            try:
                await writer.wait_closed()
            except OSError:
                pass  # it has ended before
        if self._server is not None:
            self._server.close()


def hold(path: Path, place: Place, within: float) -> int:
    """A sibling's whole life; returns its exit code. `within`: seconds to wait for the first task."""
    # The first task decides when the node's tasks end, also when Slurm signals all of them.
    for number in signals.ALL:
        signal.signal(number, signal.SIG_IGN)
    deadline = time.monotonic() + within
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        while True:
            try:
                sock.connect(str(path))
                break
            except OSError:
                if time.monotonic() > deadline:
                    os.write(2, b"torchpass: the first task of this node has not started\n")
                    return 1
                time.sleep(_RETRY)
        said = {"local_id": place.local_id, "cpus": place.cpus, "devices": place.devices}
        try:
            sock.sendall(json.dumps(said).encode() + b"\n")
            code = sock.recv(1)
        except OSError:
            code = b""
    return code[0] if code else 1

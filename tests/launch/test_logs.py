"""Worker output: prefixes, files, lines that do not end, readers that do not read."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from tpwrap.launch import logs
from tpwrap.launch.logs import Labels, LogFiles, Relay, Writer


def relay(tmp_path: Path, speak: Callable[[int, Labels], Awaitable[None]]) -> tuple[str, LogFiles]:
    """What appears on the terminal when `speak(fd, labels)` writes to a worker's pipe."""
    shown = tmp_path / "terminal"
    files = LogFiles(tmp_path / "logs")

    async def main() -> None:
        terminal = os.open(shown, os.O_WRONLY | os.O_CREAT)
        writer = Writer()
        read_end, write_end = os.pipe()
        labels = Labels("node 2 warm", "node2")
        one = Relay(read_end, terminal, labels, writer, files)
        await speak(write_end, labels)
        os.close(write_end)
        while not one.closed:
            await asyncio.sleep(0.01)
        writer.close(5)
        os.close(terminal)

    asyncio.run(asyncio.wait_for(main(), 20))
    return shown.read_text(), files


def test_prefix_follows_the_rank(tmp_path: Path) -> None:
    async def speak(fd: int, labels: Labels) -> None:
        os.write(fd, b"warming up\n")
        await asyncio.sleep(0.05)
        labels.prefix, labels.file = "rank 3", "rank3"
        os.write(fd, b"step 1\nste")
        await asyncio.sleep(0.05)
        os.write(fd, b"p 2\nlast")

    shown, _ = relay(tmp_path, speak)
    assert shown == "[node 2 warm] warming up\n[rank 3] step 1\n[rank 3] step 2\n[rank 3] last\n"
    assert (tmp_path / "logs/rank3.log").read_text() == "step 1\nstep 2\nlast"
    assert (tmp_path / "logs/node2.log").read_text() == "warming up\n"


def test_progress_bar_shows_its_last_state_now_and_then(tmp_path: Path) -> None:
    async def speak(fd: int, labels: Labels) -> None:
        for percent in range(30):
            os.write(fd, f"\r{percent}%".encode())
            await asyncio.sleep(0.05)
        os.write(fd, b"\r100%\n")

    shown, _ = relay(tmp_path, speak)
    assert 2 <= shown.count("\n") <= 4
    assert shown.endswith("[node 2 warm] 100%\n")
    assert (tmp_path / "logs/node2.log").read_bytes().count(b"\r") == 31


def test_terminal_that_takes_nothing_stops_the_worker_and_not_us(tmp_path: Path, monkeypatch: object) -> None:
    line = b"x" * 999 + b"\n"
    total = 3 * logs._HIGH_WATER

    async def main() -> tuple[int, int]:
        stuck_read, stuck_write = os.pipe()
        writer = Writer()
        read_end, write_end = os.pipe()
        one = Relay(read_end, stuck_write, Labels("rank 0", "rank0"), writer, LogFiles(tmp_path))
        written = [0]

        def work() -> None:
            while written[0] < total:
                written[0] += os.write(write_end, line)
            os.close(write_end)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        before = -1
        while written[0] != before:  # until the worker is stuck in write()
            before = written[0]
            await asyncio.sleep(0.3)
        got = 0
        reading = asyncio.get_running_loop().run_in_executor(None, lambda: drain(stuck_read))
        while not one.closed:
            await asyncio.sleep(0.01)
        worker.join(5)
        writer.close(10)
        os.close(stuck_write)
        got = await reading
        return before, got

    def drain(fd: int) -> int:
        got = 0
        while part := os.read(fd, 1 << 16):
            got += len(part)
        return got

    stuck_at, got = asyncio.run(asyncio.wait_for(main(), 60))
    assert stuck_at < 2 * logs._HIGH_WATER
    assert got == total // len(line) * (len(line) + len("[rank 0] ")) or got > total


def test_closed_terminal_does_not_stop_the_file(tmp_path: Path) -> None:
    async def main() -> None:
        read_terminal, terminal = os.pipe()
        os.close(read_terminal)
        writer = Writer()
        read_end, write_end = os.pipe()
        one = Relay(read_end, terminal, Labels("rank 0", "rank0"), writer, LogFiles(tmp_path))
        for number in range(3):
            os.write(write_end, f"{number}\n".encode())
            await asyncio.sleep(0.05)
        os.close(write_end)
        while not one.closed:
            await asyncio.sleep(0.01)
        writer.close(5)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert (tmp_path / "rank0.log").read_text() == "0\n1\n2\n"

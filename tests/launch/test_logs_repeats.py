"""A newcomer's lines that the failed rank had printed already: once in the log, once on the terminal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import msgspec
import pytest

from tpwrap.control.messages import Muted
from tpwrap.launch import logs
from tpwrap.launch.command import Command
from tpwrap.launch.logs import Labels, LogFiles, Relay, Writer
from tpwrap.launch.node import NodeSpec
from tpwrap.launch.repeats import Repeats, essence, start_of, take_from
from tpwrap.launch.supervisor import Supervisor
from tpwrap.launch.worker import Worker

LINES = (b"step 1", b"step 2", b"", b"epoch")


@pytest.mark.parametrize("seed", range(50))
def test_each_expected_line_is_dropped_once_and_no_other(seed: int) -> None:
    random = Random(seed)
    printed = random.choices(LINES, k=random.randrange(8))
    later = random.choices(LINES, k=5)
    repeats = Repeats(printed)
    random.shuffle(printed)
    assert all(repeats.drop(line) for line in printed)
    assert not repeats.expected
    assert not any(repeats.drop(line) for line in later)


def test_another_line_ends_it() -> None:
    repeats = Repeats([b"a", b"b", b"c"])
    assert [repeats.drop(line) for line in (b"a", b"x", b"b")] == [True, False, False]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"2026-11-30 19:48:53,123 INFO loss 0.5", b"2026-12-01 00:00:01,004 INFO loss 0.5"),
        (b"\r 10%|#  | 1/10 [00:00<00:09,  9.8it/s]\r100%|###| 10/10 [00:01<00:00,  9.8it/s]",
         b"100%|###| 10/10 [00:02<00:00,  5.1it/s]\r"),
    ],
)  # fmt: skip
def test_the_time_of_day_makes_no_difference(one: bytes, other: bytes) -> None:
    assert essence(one) == essence(other)


def test_numbers_make_a_difference() -> None:
    assert essence(b"step 1 loss 0.5") != essence(b"step 2 loss 0.5")


def test_where_they_start() -> None:
    log = [b"a", b"b", b"c", b"d", b"e"]
    assert start_of(log, 3, [b"b", b"c"]) == 3
    assert start_of(log, 2, [b"c", b"b"]) == 3  # the log has a line that the script has not printed
    assert start_of(log, 2, [b"never"]) == 2
    assert start_of(log, 0, []) == 0
    assert start_of(log, 9, [b"x"]) == 9


@pytest.mark.parametrize(
    ("text", "lines", "last", "expected", "left"),
    [
        (b"a\nb\nc\nd\n", 2, [b"a", b"b"], [b"c", b"d"], b"a\nb\nc\nd\n"),
        (b"a\nb\nc\ncu", 2, [b"a", b"b"], [b"c"], b"a\nb\nc\n"),
        (b"a\nb\ncu", 2, [b"a", b"b"], [], b"a\nb\n"),
        (b"a\ncu", 3, [b"a", b"b", b"c"], [], b"a\ncu\n"),
        (b"cu", 0, [], [], b""),
        (b"", 0, [], [], b""),
        (b"[W1] warning\na\nb\nc\n", 2, [b"a", b"b"], [b"c"], b"[W1] warning\na\nb\nc\n"),
    ],
)
def test_what_the_log_file_says(
    tmp_path: Path, text: bytes, lines: int, last: list[bytes], expected: list[bytes], left: bytes
) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(text)
    assert take_from(log, lines, last) == expected
    assert log.read_bytes() == left


def test_no_log_file(tmp_path: Path) -> None:
    assert take_from(tmp_path / "rank0.log", 3, [b"a"]) == []


Speak = Callable[[int, int], Awaitable[None]]


def takes_over(tmp_path: Path, logged: bytes, muted: Muted, speak: Speak, early: bytes = b"") -> tuple[str, str]:
    """The log and the terminal when a newcomer, after a rank with this log, prints through `speak(out, err)`. `early`
    is in its pipe before its supervisor hears of `muted`."""
    log, shown = tmp_path / "logs/rank0.log", tmp_path / "terminal"
    log.parent.mkdir()
    log.write_bytes(logged)
    spec = NodeSpec(
        node=0, host="127.0.0.1", slots=1, run_dir=str(tmp_path), log_dir=str(log.parent), key_file="", socket="",
        coordinator=("", []), connect_within=1.0, failure_timeout=1.0, env={}, warm=True,
        command=Command(["true"], None, ""),
    )  # fmt: skip

    async def main() -> None:
        supervisor = Supervisor(spec, None, 0)
        supervisor._writer, supervisor._files = Writer(), LogFiles(log.parent)
        terminal = os.open(shown, os.O_WRONLY | os.O_CREAT)
        worker = Worker("n0s0w1", 0, Labels("rank 0", "rank0"))
        out, err = os.pipe(), os.pipe()
        for end, _ in (out, err):
            worker.relays.append(Relay(end, terminal, worker.labels, supervisor._writer, supervisor._files))
        os.write(out[1], early)
        supervisor._on_frame(worker, msgspec.msgpack.encode(muted))
        assert supervisor._outbox == []  # the coordinator does not hear of it
        await speak(out[1], err[1])
        os.close(out[1])
        os.close(err[1])
        while not all(relay.closed for relay in worker.relays):
            await asyncio.sleep(0.01)
        supervisor._writer.close(5)
        os.close(terminal)

    asyncio.run(asyncio.wait_for(main(), 20))
    return log.read_text(), shown.read_text()


def on_terminal(*lines: str) -> str:
    return "".join(f"[rank 0] {line}\n" for line in lines)


def test_repeats_are_dropped_and_nothing_after_them(tmp_path: Path) -> None:
    async def speak(out: int, err: int) -> None:
        os.write(out, b"step 3\nst")
        await asyncio.sleep(0.05)
        os.write(err, b"careful\n")
        await asyncio.sleep(0.05)
        os.write(out, b"ep 4\nstep 5\nstep 5\n")

    logged = b"step 1\nstep 2\nstep 3\nstep 4\ncareful\n"
    log, terminal = takes_over(tmp_path, logged, Muted(2, [b"step 1", b"step 2"]), speak)
    assert log == logged.decode() + "step 5\nstep 5\n"
    assert terminal == on_terminal("step 5", "step 5")


def test_all_at_once(tmp_path: Path) -> None:
    async def speak(out: int, err: int) -> None:
        pass

    log, terminal = takes_over(tmp_path, b"1\n2\n3\n", Muted(1, [b"1"]), speak, early=b"2\n3\n4\n5")
    assert log == "1\n2\n3\n4\n5"
    assert terminal == on_terminal("4", "5")


def test_line_that_was_cut_is_replaced(tmp_path: Path) -> None:
    async def speak(out: int, err: int) -> None:
        os.write(out, b"step 2\nste")
        await asyncio.sleep(0.05)
        os.write(out, b"p 3 loss 0.5\nstep 4\n")

    log, terminal = takes_over(tmp_path, b"step 1\nstep 2\nstep 3 lo", Muted(1, [b"step 1"]), speak)
    assert log == "step 1\nstep 2\nstep 3 loss 0.5\nstep 4\n"
    assert terminal == on_terminal("step 3 loss 0.5", "step 4")


def test_nothing_is_lost_when_the_guess_is_wrong(tmp_path: Path) -> None:
    async def speak(out: int, err: int) -> None:
        os.write(out, b"step 2\nother\nstep 3\n")

    log, terminal = takes_over(tmp_path, b"step 1\nstep 2\nstep 3\n", Muted(1, [b"step 1"]), speak)
    assert log == "step 1\nstep 2\nstep 3\nother\nstep 3\n"
    assert terminal == on_terminal("other", "step 3")


def test_log_on_another_disk(tmp_path: Path) -> None:
    async def speak(out: int, err: int) -> None:
        os.write(out, b"step 2\n")

    log, terminal = takes_over(tmp_path, b"", Muted(1, [b"step 1"]), speak)
    assert log == "step 2\n"
    assert terminal == on_terminal("step 2")


def test_unfinished_line_is_not_lost_with_the_worker(tmp_path: Path) -> None:
    async def speak(out: int, err: int) -> None:
        os.write(out, b"2\n3 and")

    log, terminal = takes_over(tmp_path, b"1\n2\n3\n", Muted(1, [b"1"]), speak)
    assert log == "1\n2\n3\n3 and"
    assert terminal == on_terminal("3 and")


def test_unfinished_line_is_logged_when_the_other_stream_ends_the_dropping(tmp_path: Path) -> None:
    async def speak(out: int, err: int) -> None:
        os.write(out, b"half")
        await asyncio.sleep(0.05)
        os.write(err, b"new\n")
        await asyncio.sleep(0.05)
        os.write(out, b" line\n")

    log, terminal = takes_over(tmp_path, b"1\n2\n", Muted(1, [b"1"]), speak)
    assert log == "1\n2\nnew\nhalf line\n"
    assert terminal == on_terminal("new", "half line")


def test_endless_line_is_not_kept_for_ever(tmp_path: Path) -> None:
    async def speak(out: int, err: int) -> None:
        for _ in range(3):
            os.write(out, b"x" * (logs._LONGEST_LINE // 2))
            await asyncio.sleep(0.05)
        assert len((tmp_path / "logs/rank0.log").read_bytes()) > logs._LONGEST_LINE

    takes_over(tmp_path, b"1\n2\n", Muted(1, [b"1"]), speak)

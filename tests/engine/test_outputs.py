"""What a script writes, muted in the fast-forward and continued at the entry.

Each test runs the same little script twice in this process: as the failed rank, which records, and as the newcomer,
which is muted up to the entry. What is on disk afterwards must be what one undisturbed run leaves there.
"""

from __future__ import annotations

import gc
import gzip
import io
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpwrap.engine.script import virtual
from tpwrap.engine.script.outputs import Muted, Outputs
from tpwrap.engine.script.virtual import Continuation, OutputsError, alike, by_bytes, by_lines

Script = Callable[[Callable[[int], None]], None]
"""script(step_done): calls step_done(k) at the exit of update k"""


class Died(BaseException):
    """The rank is gone."""


class Tape:
    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []
        self.playing = False

    def __call__(self, kind: str, compute: Callable[[], Any]) -> Any:
        if self.playing and self.entries:
            recorded, value = self.entries.pop(0)
            assert recorded == kind
            return value
        value = compute()
        if not self.playing:
            self.entries.append((kind, value))
        return value


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fail_over(script: Script, entry: int, death: int, last: int = 5) -> Muted:
    """A rank that is lost after `death`, and its newcomer, which enters at `entry` and goes on to `last`. The entries
    of the tape after `entry` are not known to the newcomer."""
    tape = Tape()
    failed = Outputs(cross=tape)
    failed.install(live=True)
    known: list[Any] = []

    def until_death(step: int) -> None:
        if step == entry:
            known[:] = tape.entries
        if step == death:
            raise Died

    try:
        script(until_death)
    except Died:
        gc.collect()
    finally:
        failed.uninstall()
    tape.entries, tape.playing = known, True
    newcomer = Outputs(cross=tape)
    result: list[Muted] = []

    def enter(step: int) -> None:
        if step == entry:
            result.append(newcomer.go_live())
        if step == entry + 2:
            newcomer.caught_up()
        if step == last:
            raise Died

    newcomer.install()
    try:
        script(enter)
    except Died:
        gc.collect()
    finally:
        newcomer.uninstall()
    return result[0]


def tree(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else b"" for path in sorted(place.rglob("*"))
    }


def clear(place: Path) -> None:
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check(place: Path, script: Script, entry: int = 2, death: int = 4, last: int = 5) -> Muted:
    """The directory after the failover is that after an undisturbed run."""

    def stop(step: int) -> None:
        if step == last:
            raise Died

    clear(place)
    with pytest.raises(Died):
        script(stop)
    gc.collect()
    undisturbed = tree(place)
    clear(place)
    found = fail_over(script, entry, death, last)
    assert tree(place) == undisturbed
    return found


# --- where a file goes on ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disk", "muted", "keep", "add"),
    [
        (b"", b"", 0, b""),
        (b"a\nb\nc\n", b"A\nBB\n", 4, b""),
        (b"a\nb\nc\n", b"a\nb\nta", 4, b"ta"),
        (b"a\nb\ntail and more", b"a\nb\nta", 4, b"ta"),
        (b"a\nb", b"a\nbb\nc\nta", 2, b"bb\nc\nta"),
        (b"", b"a\n", 0, b"a\n"),
    ],
)
def test_text_goes_on_by_lines(disk: bytes, muted: bytes, keep: int, add: bytes) -> None:
    assert by_lines(disk, muted) == Continuation(keep, add)


def test_the_rest_goes_on_by_bytes() -> None:
    assert by_bytes(b"abcdef", b"ABC") == (3, b"")
    assert by_bytes(b"ab", b"ABC") == (2, b"C")


def test_numbers_make_no_difference() -> None:
    assert alike(b"12:03 loss 1\nmore", b"9:59 loss 10\n")
    assert not alike(b"rank loss\n", b"rang loss\n")


# --- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entry", "death"), [(0, 0), (0, 3), (2, 2), (2, 3), (2, 4), (4, 4)])
@pytest.mark.parametrize("mode", ["w", "a", "x", "w+", "a+"])
def test_text_that_stays_open(place: Path, mode: str, entry: int, death: int) -> None:
    def script(done: Callable[[int], None]) -> None:
        with open("log.csv", mode, newline="", encoding="utf-8") as log:
            if log.tell() == 0:
                log.write("step,loss é\n")
            for step in range(6):
                log.write(f"{step},{step / 7}\nhalf ")
                done(step)
                log.write("a line\n")
                log.flush()

    found = check(place, script, entry, death)
    assert found.calls == {"open": 1}
    assert found.doubts == []


@pytest.mark.parametrize("earlier", ["", "from another run\n", "no end of line"])
def test_text_that_is_opened_again_and_again(place: Path, earlier: str) -> None:
    def script(done: Callable[[int], None]) -> None:
        with open("log.txt", "w") as log:
            log.write(earlier)
        for step in range(6):
            with Path("log.txt").open("a") as log:
                if log.tell() == 0:
                    log.write("header\n")
                log.write(f"{step}\n")
            done(step)
            with open("log.txt", "a") as log:
                log.write(f"after {step}\n")

    for entry, death in ((0, 1), (2, 2), (2, 4), (3, 4)):
        check(place, script, entry, death)


def test_what_was_in_it_before_the_run(place: Path) -> None:
    def script(done: Callable[[int], None]) -> None:
        with open("log.txt", "a") as log:
            for step in range(6):
                log.write(f"{step} of {log.tell()}\n")
                done(step)

    Path("log.txt").write_text("earlier\nrun")
    fail_over(script, 2, 4)
    found = Path("log.txt").read_text().splitlines()
    assert found[:2] == ["earlier", "run0 of 11"]
    assert [line.split()[0] for line in found[2:]] == ["1", "2", "3", "4", "5"]


def test_times_of_day_may_differ(place: Path) -> None:
    clock = iter(range(95, 1000))

    def script(done: Callable[[int], None]) -> None:
        log = open("log.txt", "w")
        for step in range(6):
            log.write(f"{next(clock)} s: step {step}\n")
            done(step)
        log.close()

    fail_over(script, 2, 4)
    assert [line.split()[-1] for line in Path("log.txt").read_text().splitlines()] == list("012345")


def test_binary(place: Path) -> None:
    def script(done: Callable[[int], None]) -> None:
        with open("data", "wb") as data, gzip.GzipFile("data.gz", "wb", mtime=0) as packed:
            for step in range(6):
                packed.write(b"%d" % step * 1000)
                data.write(bytes([step]) * 10_000)
                np.full(7, step).tofile(data)
                np.save(data, np.full(5, step))
                done(step)

    check(place, script)


def test_binary_that_is_written_in_the_middle(place: Path) -> None:
    def script(done: Callable[[int], None]) -> None:
        with open("data", "w+b") as data:
            data.write(bytes(100))
            for step in range(6):
                data.seek(10 * step)
                data.write(b"0123456789")
                data.seek(0)
                assert data.read(10) == b"0123456789"
                data.seek(0, 2)
                data.write(b"x")
                done(step)

    check(place, script)


def test_objects_that_are_kept_go_on(place: Path) -> None:
    def script(done: Callable[[int], None]) -> None:
        logger = logging.Logger("test")
        handler = logging.FileHandler("train.log", mode="w")
        logger.addHandler(handler)
        data = open("data.bin", "wb", buffering=0)
        for step in range(6):
            logger.warning("step %d", step)
            data.write(b"%d" % step)
            assert (data.name, data.mode, data.fileno() > 2) == ("data.bin", "wb", True)
            os.fsync(data.fileno())
            done(step)

    check(place, script)


def test_fast_forward_reads_what_it_has_written_and_the_disk_stays(place: Path) -> None:
    Path("given.txt").write_text("given\n")
    Path("log.txt").write_text("of the failed rank\n")
    outputs = Outputs()
    before = tree(place)
    outputs.install()
    try:
        with open("log.txt", "w") as log:
            log.write("mine\n")
            log.flush()
            assert Path("log.txt").read_text() == "mine\n"
        with open("state.json.tmp", "w") as state:
            json.dump({"a": 1}, state)
        os.replace("state.json.tmp", "state.json")
        shutil.copyfile("state.json", "copy.json")
        with open("state.json") as one, open("copy.json", "rb") as two:
            assert json.load(one) == json.load(two) == {"a": 1}
        assert Path("given.txt").read_text() == "given\n"
        os.remove("given.txt")
        os.rename("given.txt", "taken.txt")
        os.chmod("given.txt", 0)
        shutil.rmtree(place)
        shutil.move("given.txt", "taken.txt")
        with pytest.raises(FileNotFoundError):
            open("nowhere/log.txt", "w")
        os.remove("state.json")
        with pytest.raises(FileNotFoundError):
            open("state.json")
        torch.save({}, "model.pt")
        np.save("x.npy", np.ones(3))
        np.savetxt("x.txt", np.ones(3))
        buffer = io.BytesIO()
        torch.save(torch.ones(2), buffer)
        assert buffer.tell() > 0
        os.mkdir("made")
        os.makedirs("made", exist_ok=True)
        Path("made/deep/er").mkdir(parents=True)
        with tempfile.NamedTemporaryFile("w") as scratch, tempfile.TemporaryDirectory() as directory:
            scratch.write("x")
            scratch.flush()
            assert os.path.getsize(scratch.name) == 1
            (Path(directory) / "x").write_text("really")
            assert subprocess.run(["cat", f"{directory}/x"], capture_output=True, check=True).stdout == b"really"
        assert not os.path.exists(directory)
        assert tree(place) == {**before, "made": b"", "made/deep": b"", "made/deep/er": b""}
        calls = outputs.muted().calls
        assert calls["torch.save"] == calls["numpy.save"] == calls["numpy.savetxt"] == 1
        assert (calls["remove"], calls["open"]) == (2, 2)
    finally:
        outputs.uninstall()
    assert open is io.open
    assert "muted" not in repr(os.remove)


def test_atomic_replacement_and_rotation(place: Path) -> None:
    def script(done: Callable[[int], None]) -> None:
        for step in range(6):
            handle, name = tempfile.mkstemp(dir=".")
            with os.fdopen(handle, "w") as temporary:
                temporary.write(f"{step}\n" * (step + 1))
            os.replace(name, "state.txt")
            torch.save(torch.full((2,), step), f"model{step}.pt")
            if step > 1:
                os.remove(f"model{step - 2}.pt")
            done(step)
            os.makedirs(f"epoch{step}")
            if step > 0:
                os.rename(f"epoch{step - 1}", f"old{step - 1}")

    for entry, death in ((0, 2), (2, 3), (2, 4)):
        check(place, script, entry, death)


def test_files_that_another_process_appends_to_are_not_cut(place: Path) -> None:
    held, release = multiprocessing.Event(), multiprocessing.Event()

    def other() -> None:
        with open("log.txt", "a") as log:
            virtual.mark(log.fileno())
            log.write("step 0\nstep 1\nstep 2\nstep 3\n")
            log.flush()
            held.set()
            release.wait(20)

    process = multiprocessing.get_context("fork").Process(target=other)
    process.start()
    held.wait(20)
    Path("log.txt").touch()

    def script(done: Callable[[int], None]) -> None:
        with open("log.txt", "a") as log:
            for step in range(6):
                log.write(f"step {step}\n")
                done(step)

    found = fail_over(script, 2, 3)
    release.set()
    process.join()
    assert found.doubts == [str(place / "log.txt")]
    lines = Path("log.txt").read_text().splitlines()
    assert lines[:4] == ["step 0", "step 1", "step 2", "step 3"]
    assert lines[-3:] == ["step 3", "step 4", "step 5"]


def test_appending_in_turns_is_noticed(place: Path) -> None:
    def script(done: Callable[[int], None]) -> None:
        for step in range(6):
            with open("log.txt", "a") as log:
                log.write(f"{step}\n")
            subprocess.run(["sh", "-c", "echo other >> log.txt"], check=True)
            done(step)

    found = fail_over(script, 2, 3)
    assert found.doubts == [str(place / "log.txt")]
    assert [line for line in Path("log.txt").read_text().splitlines() if line != "other"] == list("0123345")


def test_lines_that_never_reached_the_disk_are_written(place: Path) -> None:
    """The disk of the failed rank is not ours, or it had not written them."""

    def script(done: Callable[[int], None]) -> None:
        os.makedirs("logs", exist_ok=True)
        with open("logs/log.txt", "w") as text, open("logs/data", "wb") as data:
            for step in range(6):
                text.write(f"{step}\n")
                data.write(b"%d" % step)
                if lose and step == 4:
                    shutil.rmtree("logs")
                done(step)

    lose = False
    check(place, script)
    undisturbed = tree(place)
    lose = True
    shutil.rmtree("logs")
    with open(os.devnull, "w") as nowhere:
        nowhere.write("x")
    fail_over(script, 2, 4, last=3)
    assert tree(place)["logs/log.txt"] == b"0\n1\n2\n3\n"
    assert undisturbed["logs/log.txt"].startswith(b"0\n1\n2\n3\n")


def test_too_much_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "KEPT", 1 << 16)
    outputs = Outputs()
    outputs.install()
    try:
        for name in ("large", "small"):
            with open(name, "wb") as file:
                file.write(bytes(1 << 17 if name == "large" else 10))
        with pytest.raises(OutputsError, match=r"large is read again"):
            open("large", "rb")
        monkeypatch.setattr(virtual, "MOST", 1 << 16)
        kept = open("large", "wb")
        kept.write(bytes(1 << 17))
        with pytest.raises(OutputsError, match="keeps open"):
            open("more", "wb")
    finally:
        outputs.uninstall()


def test_long_log_that_is_opened_again_and_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "KEPT", 1 << 14)

    def script(done: Callable[[int], None]) -> None:
        for step in range(6):
            with open("log.txt", "a") as log:
                log.write(f"{step} {'x' * 9000}\n")
            with open("other.txt", "a") as log:
                log.write(f"{step}\n")
            done(step)

    assert check(place, script, 3, 4).doubts == []


def test_forks_and_engine_threads_write_for_real(place: Path) -> None:
    outputs = Outputs(run_dir=str(place / "run"))
    outputs.install()
    try:
        (place / "run").mkdir()
        (place / "run/events").write_text("real")
        with outputs.real():
            Path("mine").write_text("real")

        def write(name: str) -> None:
            Path(name).write_text("real")

        process = multiprocessing.get_context("fork").Process(target=write, args=("fork",))
        process.start()
        process.join()
        for name in ("torchpass-link", "script's own"):
            thread = threading.Thread(target=write, args=(name,), name=name)
            thread.start()
            thread.join()
        assert set(tree(place)) == {"run", "run/events", "mine", "fork", "torchpass-link"}
    finally:
        outputs.uninstall()


def test_what_another_process_has_done_already_is_no_error(place: Path) -> None:
    def change() -> None:
        os.mkdir("made")
        os.makedirs("made/deep")
        open("made/new", "x").close()
        os.rename("one", "two")
        Path("three").unlink()
        os.symlink("two", "link")

    for name in ("one", "three"):
        Path(name).touch()
    change()
    before = tree(place)
    outputs = Outputs()
    outputs.install(live=True, again=True)
    try:
        change()
        assert tree(place) == before
        with pytest.raises(FileNotFoundError):
            os.rename("never", "anywhere")
        outputs.caught_up()
        for name, path in ((os.mkdir, "made"), (os.remove, "three")):
            with pytest.raises(OSError, match=path):
                name(path)
    finally:
        outputs.uninstall()


def test_names_taken_by_modules_are_replaced_and_put_back(place: Path) -> None:
    import bz2
    import types

    module = types.ModuleType("script_module")
    exec("from os import remove\nfrom torch import save", module.__dict__)
    sys.modules["script_module"] = module
    taken = module.remove
    Path("kept").touch()
    outputs = Outputs()
    outputs.install()
    try:
        module.remove("kept")
        module.save({}, "not there")
        with bz2.open("packed", "wt") as packed:
            packed.write("x")
        assert set(tree(place)) == {"kept"}
    finally:
        outputs.uninstall()
        del sys.modules["script_module"]
    assert module.remove is taken


def test_saving_is_set_aside_in_a_live_rank(place: Path) -> None:
    import contextlib

    inside: list[str] = []

    @contextlib.contextmanager
    def aside() -> Iterator[None]:
        inside.append("in")
        yield
        inside.append("out")

    outputs = Outputs(aside=aside)
    outputs.install(live=True)
    try:
        torch.save({"a": 1}, "model.pt")
    finally:
        outputs.uninstall()
    assert inside == ["in", "out"]
    assert torch.load("model.pt") == {"a": 1}


def test_distributed_checkpoint_is_muted(place: Path) -> None:
    import torch.distributed.checkpoint as dcp

    outputs = Outputs()
    outputs.install()
    try:
        dcp.save({"a": torch.ones(2)}, checkpoint_id="checkpoint")
        assert dcp.async_save({"a": torch.ones(2)}, checkpoint_id="checkpoint").result() is None
        assert outputs.muted().calls == {
            "torch.distributed.checkpoint.save": 1,
            "torch.distributed.checkpoint.async_save": 1,
        }
    finally:
        outputs.uninstall()
    assert tree(place) == {}


def test_tensorboard_goes_on_in_the_file_of_the_failed_rank(place: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.summary.writer import event_file_writer
    from torch.utils.tensorboard import SummaryWriter

    def script(done: Callable[[int], None]) -> None:
        event_file_writer._global_uid = type(event_file_writer._global_uid)(0)  # as in a process of its own
        writer = SummaryWriter()
        for step in range(6):
            writer.add_scalar("loss", step / 7, step)
            if step > 2:
                writer.flush()
            done(step)

    fail_over(script, 2, 4)
    [file] = Path("runs").rglob("events*")
    events = list(EventFileLoader(str(file)).Load())
    assert [event.step for event in events] == [0, 0, 1, 2, 3, 4, 5]


# --- streams ----------------------------------------------------------------------------------------

STREAMS = """
import logging, os, sys
kept, buffer, handler = sys.stdout, sys.stderr.buffer, logging.StreamHandler()
from tpwrap.engine.script.outputs import Outputs
print("before")
outputs = Outputs()
outputs.install()
print("one"); print("two", file=kept); print("three", file=sys.stderr)
buffer.write(b"four\\nfive"); handler.setFormatter(logging.Formatter("%(message)s"))
print(" and half", end="")
if not os.fork():
    print("in a fork", flush=True)
    os._exit(0)
os.wait()
sys.stdout.writelines(["", " a line"])
assert kept.fileno() == 1 and not kept.isatty()
print("\\r10%\\r20%", end="", file=sys.stderr)
found = outputs.muted()
assert (found.lines, found.last) == (4, [b"two", b"three", b"four"]), found
assert outputs.go_live()[:3] == found[:3]
print(" more"); print("seven", file=kept); print(); handler.emit(logging.makeLogRecord({"msg": "eight"}))
"""


@pytest.mark.parametrize("options", [[], ["-u"]])
def test_streams_are_muted_and_go_on_within_the_line(options: list[str]) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, *options, "-c", STREAMS], capture_output=True, text=True, cwd=root, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "before\nin a fork\n and half a line more\nseven\n\n"
    assert done.stderr == "five\r10%\r20%eight\n".replace("\r", "\n") or done.stderr == "five\n10%\n20%eight\n"

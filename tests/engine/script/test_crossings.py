"""Each place where values come into the script is recorded live and answered in a newcomer.

The patches are for a whole process: one process of its own runs all of this file's scripts, twice each, and says what
it has found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PLACES: dict[str, tuple[str, str]] = {
    # name: what the script says, the kinds that are recorded
    "item": ("t.sum().item()", "v"),
    "tolist": ("t.tolist()", "v"),
    "numpy": ("t.numpy().tolist()", "v"),
    "asarray": ("np.asarray(t).tolist()", "v"),
    "bool": ("bool(t[0] > 0)", "v"),
    "if": ("'yes' if t[1] > 0.5 else 'no'", "v"),
    "and": ("(t[1] > 0.5 and t[0] > 0.5).tolist()", "vv"),
    "float": ("float(t[0])", "v"),
    "int": ("int(t[0] * 100)", "v"),
    "complex": ("complex(t[0]).real", "v"),
    "index": ("list(range(n))", "v"),
    "in": ("0.5 in t", "v"),
    "repr": ("repr(t)", "v"),
    "str": ("str(t)", "v"),
    "f-string": ("f'{t[0]:.3f} {t}'", "vv"),
    "format": ("'%.3f' % t[0]", "v"),
    "math": ("math.sqrt(t[0])", "v"),
    "equal": ("torch.equal(t, t)", "v"),
    "method equal": ("t.equal(t * 2)", "v"),
    "allclose": ("torch.allclose(t, t)", "v"),
    "method allclose": ("t.allclose(t + 1)", "v"),
    "is_nonzero": ("torch.is_nonzero(t[0])", "v"),
    "max": ("max([t[0], t[1]]).item()", "vv"),
    "sorted": ("[x.item() for x in sorted([t[1], t[0]])]", "vvv"),
    "parameter": ("float(torch.nn.Parameter(t)[0])", "v"),
    "scalar tensor": ("torch.tensor(3.5 * float(t[0])).item()", "vv"),
    "initial_seed": ("torch.initial_seed()", "v"),
    "seed": ("torch.seed()", "v"),
    "os.path.exists": ("os.path.exists(there), os.path.exists(missing)", "ff"),
    "os.path.isfile": ("os.path.isfile(there)", "f"),
    "os.path.isdir": ("os.path.isdir(folder)", "f"),
    "os.path.lexists": ("os.path.lexists(there)", "f"),
    "os.path.getsize": ("os.path.getsize(there)", "f"),
    "os.path.getmtime": ("os.path.getmtime(there)", "f"),
    "os.listdir": ("sorted(os.listdir(folder))", "f"),
    "glob": ("sorted(glob.glob(folder + '/*'))", "f"),
    "Path.exists": ("pathlib.Path(there).exists()", "f"),
    "Path.is_file": ("pathlib.Path(there).is_file()", "f"),
    "Path.is_dir": ("pathlib.Path(folder).is_dir()", "f"),
    "time": ("time.time()", "t"),
    "time_ns": ("time.time_ns()", "t"),
    "perf_counter": ("time.perf_counter()", "t"),
    "perf_counter_ns": ("time.perf_counter_ns()", "t"),
    "monotonic": ("time.monotonic()", "t"),
    "monotonic_ns": ("time.monotonic_ns()", "t"),
    "process_time": ("time.process_time()", "t"),
    "strftime": ("time.strftime('%H:%M:%S')", "t"),
    "ctime": ("time.ctime()", "t"),
    "asctime": ("time.asctime()", "t"),
    "localtime": ("(lambda x: (type(x).__name__, list(x)))(time.localtime())", "t"),
    "gmtime": ("list(time.gmtime())", "t"),
    "datetime.now": ("repr(datetime.datetime.now())", "t"),
    "datetime.now in a zone": ("repr(datetime.datetime.now(datetime.timezone.utc))", "t"),
    "datetime.now by keyword": ("repr(datetime.datetime.now(tz=None))", "t"),
    "datetime.utcnow": ("repr(datetime.datetime.utcnow())", "t"),
    "datetime.today": ("repr(datetime.datetime.today())", "t"),
    "date.today": ("repr(datetime.date.today())", "t"),
    "uuid1": ("repr(uuid.uuid1())", "u"),
    "uuid4": ("repr(uuid.uuid4())", "u"),
    "urandom": ("os.urandom(8).hex()", "u"),
    "secrets": ("os.urandom(4).hex() + os.urandom(4).hex()", "uu"),
}
# Not the script's, or nothing that comes out of a tensor.
SILENT: dict[str, str] = {
    "arithmetic": "(t + 1).shape",
    "shape": "list(t.shape) + [t.dim(), t.numel(), len(t)]",
    "library's exists": "library.ask(there)",
    "library's clock": "library.clock() > 0",
    "import machinery": "__import__('importlib').util.find_spec('antigravity') is not None",
    "made of numbers": "datetime.datetime(2020, 1, 1).isoformat()",
    "own boundary": "quiet(lambda: (t.tolist(), os.path.exists(there)))() is not None",
}

PROGRAM = r"""
import datetime, glob, json, math, os, pathlib, random, sys, tempfile, time, types, uuid, warnings
import importlib.util
import numpy as np
import torch
from tpwrap.engine.script import crossings, files
from tpwrap.engine.script.boundary import Boundary, Mode
from tpwrap.engine.script.tape import Tape

warnings.simplefilter("ignore")


def fail(reason):
    raise RuntimeError(reason)


original = {"datetime": datetime.datetime, "date": datetime.date}
boundary = Boundary(Tape(), fail)
crossings.install(boundary, lambda descriptor: False)

library = types.ModuleType("library")
exec(compile(
    "import os, time\ndef ask(path): return os.path.exists(path)\ndef clock(): return time.time()",
    "/opt/site-packages/library.py", "exec"), library.__dict__)

root = tempfile.mkdtemp()
folder, there, missing = root + "/folder", root + "/folder/file", root + "/missing"
os.mkdir(folder)
with open(there, "w") as file:
    file.write("12345")


def world(t, n):
    return {**globals(), "t": t, "n": n, "quiet": boundary.quiet}


def run(expression, values, tape, mode):
    boundary.tape, boundary.mode = tape, mode
    try:
        return eval(compile(expression, "train.py", "eval"), values), [entry[0] for entry in tape.pending]
    finally:
        boundary.mode = Mode.OFF


def check(expression):
    # Plain Python first, by its own types; then live; then a newcomer with stubs, to whom the files are others.
    live = Tape()
    value, kinds = run(expression, world(torch.tensor([0.25, 0.75]), torch.tensor(3)), live, Mode.LIVE)
    end, closed = live.seal()
    newcomer = Tape()
    newcomer.load([closed] if closed else [], end)
    os.rename(folder, root + "/elsewhere")
    try:
        answer, _ = run(expression, world(torch.zeros(2), torch.tensor(0)), newcomer, Mode.FORWARD)
    finally:
        os.rename(root + "/elsewhere", folder)
    return {"kinds": "".join(kinds), "live": repr(value), "newcomer": repr(answer), "left": newcomer.left}


def mute(expression):
    values = world(torch.tensor([0.25, 0.75]), torch.tensor(3))
    live = Tape()
    run(expression, values, live, Mode.LIVE)
    end, _ = live.seal()
    newcomer = Tape()
    newcomer.load([], end)
    run(expression, values, newcomer, Mode.FORWARD)
    return {"kinds": [entry[0] for entry in live.pending], "count": live.count}


def other_thread():
    import threading
    boundary.tape, boundary.mode = Tape(), Mode.LIVE
    thread = threading.Thread(target=lambda: (torch.ones(1).item(), eval(compile("time.time()", "train.py", "eval"))))
    thread.start()
    thread.join()
    boundary.mode = Mode.OFF
    return boundary.tape.count


def failed(expression):
    # The question raises live, and the newcomer's must, too, whatever it would find.
    live = Tape()
    code = (
        "found = []\n"
        "for name in (there, missing, there):\n"
        "    try:\n"
        f"        found.append({expression})\n"
        "    except Exception as error:\n"
        "        found.append(type(error).__name__)\n"
    )
    def once(tape, mode):
        values = world(torch.ones(2), torch.tensor(0))
        boundary.tape, boundary.mode = tape, mode
        try:
            exec(compile(code, "train.py", "exec"), values)
        except RuntimeError as error:
            return f"gave up: {error}"
        finally:
            boundary.mode = Mode.OFF
        return repr(values["found"])
    first = once(live, Mode.LIVE)
    end, _ = live.seal()
    newcomer = Tape()
    newcomer.load([], end)
    return {"live": first, "newcomer": once(newcomer, Mode.FORWARD)}


def types_kept():
    class Mine(datetime.datetime):
        pass

    return {
        "same classes": datetime.datetime is original["datetime"] and datetime.date is original["date"],
        "subclass": type(Mine.now()).__name__,
        "docs": datetime.datetime.now.__doc__ is not None and os.path.exists.__name__ == "exists",
        "callable through an instance": isinstance(datetime.datetime(2020, 1, 1).now(), datetime.datetime),
    }


def unobserved():
    boundary.tape, boundary.mode = Tape(), Mode.OFF
    torch.ones(1).item(); eval(compile("time.time(), os.path.exists('/')", "train.py", "eval"))
    return boundary.tape.count


def collective(name):
    # Objects of other ranks, in a world of one, after the training has begun.
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    calls = {
        "all_gather_object": "dist.all_gather_object(into, {'loss': value})",
        "all_gather_object by keyword": "dist.all_gather_object(object_list=into, obj={'loss': value})",
        "gather_object": "dist.gather_object({'loss': value}, into)",
        "broadcast_object_list": "into[0] = {'loss': value}; dist.broadcast_object_list(into, 0)",
        "scatter_object_list": "dist.scatter_object_list(into, [{'loss': value}], 0)",
    }
    results = []
    live, newcomer = Tape(), Tape()
    for tape, mode, value in ((live, Mode.LIVE, 1), (newcomer, Mode.FORWARD, 2)):
        if mode is Mode.FORWARD:
            newcomer.load([], live.seal()[0])
        values = {"dist": dist, "into": [None], "value": value}
        boundary.tape, boundary.mode = tape, mode
        try:
            exec(compile(calls[name], "train.py", "exec"), values)
        finally:
            boundary.mode = Mode.OFF
        results.append(values["into"])
    return {"results": results, "kinds": [kind for kind, *_ in newcomer._play]}


def setup_collective():
    import torch.distributed as dist
    boundary.tape, boundary.mode, boundary.begin = Tape(), Mode.LIVE, lambda: None
    into = [None]
    try:
        dist.all_gather_object(into, 5)
    finally:
        boundary.mode, boundary.begin = Mode.OFF, None
    return [into, boundary.tape.count]


def reduced():
    import torch.distributed as dist
    told = []
    boundary.reduced = lambda tensors, equal: told.append((tensors, equal))
    tensor = torch.ones(2)
    for mode in (Mode.LIVE, Mode.FORWARD, Mode.WINDOW):
        boundary.mode = mode
        dist.all_reduce(tensor)
    boundary.mode = Mode.OFF
    return [len(told), any(one is tensor for one in told[0])]


asked = json.load(sys.stdin)
json.dump({
    "places": {name: check(expression) for name, (expression, _) in asked["places"].items()},
    "silent": {name: mute(expression) for name, expression in asked["silent"].items()},
    "thread": other_thread(),
    "failed": {one: failed(one) for one in asked["failed"]},
    "types": types_kept(),
    "unobserved": unobserved(),
    "collectives": {name: collective(name) for name in asked["collectives"]},
    "setup": setup_collective(),
    "reduced": reduced(),
}, sys.stdout)
"""
FAILED = ["os.path.getsize(name)", "os.listdir(name)", "t.item()"]
COLLECTIVES = [
    "all_gather_object",
    "all_gather_object by keyword",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    asked = json.dumps({"places": PLACES, "silent": SILENT, "failed": FAILED, "collectives": COLLECTIVES})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=asked, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", PLACES)
def test_a_place_is_recorded_live_and_answered_in_a_newcomer(found: dict[str, Any], name: str) -> None:
    _, kinds = PLACES[name]
    one = found["places"][name]
    assert one["kinds"] == kinds
    assert one["newcomer"] == one["live"]
    assert one["left"] == 0


@pytest.mark.parametrize("name", SILENT)
def test_what_is_not_the_scripts_or_no_value_is_not_recorded(found: dict[str, Any], name: str) -> None:
    assert found["silent"][name] == {"kinds": [], "count": 0}


def test_another_thread_records_nothing(found: dict[str, Any]) -> None:
    assert found["thread"] == 0


def test_nothing_is_recorded_when_nothing_is_observed(found: dict[str, Any]) -> None:
    assert found["unobserved"] == 0


@pytest.mark.parametrize("expression", FAILED)
def test_a_question_that_raises_raises_in_a_newcomer(found: dict[str, Any], expression: str) -> None:
    one = found["failed"][expression]
    assert one["newcomer"] == one["live"]


def test_dates_keep_their_classes(found: dict[str, Any]) -> None:
    assert found["types"] == {
        "same classes": True,
        "subclass": "Mine",
        "docs": True,
        "callable through an instance": True,
    }


@pytest.mark.parametrize("name", COLLECTIVES)
def test_objects_of_other_ranks_are_answered(found: dict[str, Any], name: str) -> None:
    one = found["collectives"][name]
    assert one["kinds"] == ["o"]
    assert one["results"] == [[{"loss": 1}], [{"loss": 1}]]


def test_in_set_up_objects_are_exchanged_for_real_and_not_recorded(found: dict[str, Any]) -> None:
    assert found["setup"] == [[5], 0]


def test_collectives_on_tensors_are_told_in_the_window_only(found: dict[str, Any]) -> None:
    assert found["reduced"] == [1, True]

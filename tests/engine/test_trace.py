"""What a rank writes in a rehearsal: equal for equal computations, different for different ones, and nothing else."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpwrap.engine import randomness
from tpwrap.engine.script import rehearsing, trace
from tpwrap.engine.script.trace import Trace, shown
from tpwrap.engine.state import ReplicaState
from tpwrap.report import traces


class Meter:
    def __init__(self, total: float = 0.0) -> None:
        self.total = total
        self.owner = self


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 2),
        (0.1, np.nextafter(0.1, 1.0).item()),
        (1, True),
        ("a", "b"),
        (b"a", b"b"),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        ([1, [2]], [1, [3]]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (np.arange(3), np.arange(4)),
        (np.float32(1), np.float64(1)),
        (Meter(1.0), Meter(2.0)),
        ([0] * 100, [0] * 99 + [1]),
        ({"x": torch.zeros(50), "y": ["a" * 100]}, {"x": torch.zeros(50), "y": ["a" * 101]}),
    ],
)
def test_different_values_are_shown_differently(a: Any, b: Any) -> None:
    assert shown(a) != shown(b)
    assert shown(a) == shown(a)
    assert max(len(shown(a)), len(shown(b))) <= 100


def test_equal_values_are_shown_alike_whatever_their_place_in_memory() -> None:
    strided = torch.arange(8.0).reshape(2, 4).t()
    assert shown(strided) == shown(strided.contiguous())
    assert shown({"b", "a", "c"}) == shown({"c", "b", "a"})
    assert shown(float("nan")) == shown(float("nan"))
    assert shown(object()) == shown(object()) == "<object>"
    endless: list[Any] = []
    endless.append(endless)
    assert shown(endless).startswith("[[[")
    assert shown(Meter()) == "<Meter>{'total': 0.0}"


def test_a_trace_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trace.VARIABLE, raising=False)
    assert Trace.begin(0, session=True) is None
    monkeypatch.setenv(trace.VARIABLE, f"2,{tmp_path}")
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    state = ReplicaState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))

    def train(one: Trace, step: int) -> None:
        one.batch([torch.full((2, 3), float(step)), "label"])
        loss = model(torch.ones(2, 3)).sum()
        one.loss(loss)
        loss.backward()
        optimizer.step()
        one.commit(step, state.digests(), state.scalars(), {"counter": step}, randomness.capture())

    first = Trace.begin(1, session=True)
    assert first is not None
    train(first, 1)
    assert not first.done(1)
    # Its replacement goes on in the same file; what it was given on its way is none of its steps.
    second = Trace.begin(1, session=True)
    assert second is not None
    second.batch("on the way")
    second.entered()
    train(second, 2)
    assert second.done(2)

    ((rank, steps),) = traces.read(tmp_path).items()
    assert (rank, list(steps)) == (1, [1, 2])
    record = steps[2]
    assert len(record["batch"]) == len(record["loss"]) == 1
    assert record["values"] == {"counter": "2"}
    assert record["scalars"]["optimizer groups 0 lr"] == "0.25"
    assert record["state"] == state.digests()
    assert set(record["random"]) == set(randomness.State._fields)
    assert traces.has_session({1: steps})
    assert traces.compare({0: steps}, {0: steps}, 1, 0).difference is None


SCRIPT = """
import json, sys
import torch
from tpwrap.engine.script import trace
counter, history, unused = 3, [0.5], 0
def step():
    local, dead = 4, 5
    print(json.dumps({k: trace.shown(v) for k, v in trace.variables(sys._getframe()).items()}))
    return local
module = torch.nn.Linear(1, 1)
for i in range(1):
    step()
    counter += i
    history.append(counter)
"""


def test_variables_are_those_that_may_still_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = subprocess.run([sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert {name: found.get(name) for name in ("counter", "history", "i", "step.local")} == {
        "counter": "3",
        "history": "[0.5]",
        "i": "0",
        "step.local": "4",
    }
    assert not {"step.dead", "module", "step", "torch"} & found.keys()


# --- a process of a rehearsal -------------------------------------------------------------------------

WRITES = """
import os, random, sys
import numpy as np
from tpwrap.engine.script import rehearsing
rehearsing.prepare(1, True)
numbers = (random.random(), np.random.rand())
os.makedirs("out/deep", exist_ok=True)
open("out/new.txt", "w").write("x")
open("kept.txt", "a").write("more")
fd = os.open("kept.txt", os.O_RDWR)
assert os.read(fd, 9) == b"kept", "a copy starts as the file is"
os.write(fd, b"!")
os.close(fd)
fd = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
os.write(fd, b"line")
os.close(fd)
fd = os.open("log.txt", os.O_RDWR)
assert os.read(fd, 9) == b"line", "what was written is there"
try:
    os.open("kept.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
except FileExistsError:
    pass
else:
    raise AssertionError
try:
    os.open("missing.txt", os.O_WRONLY)
except FileNotFoundError:
    pass
else:
    raise AssertionError
os.close(os.open("/dev/null", os.O_WRONLY))
os.remove("kept.txt")
print(numbers)
"""


def test_a_rehearsed_script_leaves_its_files_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WRITES)
    work = tmp_path / "work"
    work.mkdir()
    (work / "kept.txt").write_text("kept")
    outputs = set()
    for name in ("a", "b"):
        place = tmp_path / name
        place.mkdir()
        env = {**os.environ, trace.VARIABLE: f"6,{place}"}
        run = subprocess.run([sys.executable, str(script)], cwd=work, env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout
        outputs.add(run.stdout)
    assert len(outputs) == 1, "generators that nobody seeds differ from run to run"
    assert (work / "kept.txt").read_text() == "kept"
    assert [path for path in work.rglob("*") if path.is_file()] == [work / "kept.txt"]


def test_without_a_rehearsal_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trace.VARIABLE, raising=False)
    before = (os.open, open, random.getstate())
    rehearsing.prepare(0, True)
    assert before == (os.open, open, random.getstate())

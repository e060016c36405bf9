"""The script's own tensors: found by path in one state, put in place in another that the same code made."""

from __future__ import annotations

import copy
import functools
import sys
import time
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tpwrap.engine.script import walk
from tpwrap.engine.script.walk import Loose, inject, loose

HERE = "test_walk.py"


def pause(then: Callable[[list[FrameType]], Any]) -> Any:
    """Calls `then` with the frames of this file on the stack, as the engine does in the middle of backward()."""
    frames = walk.user_frames(sys._getframe(1))
    return then([frame for frame in frames if frame.f_code.co_filename == __file__ and "case" in frame.f_code.co_name])


@pytest.fixture(autouse=True)
def _only_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test suite's own modules are no training script."""
    monkeypatch.setattr(walk, "_modules", list)


def found(case: Callable[..., Any], seed: float = 1.0, known: Container[int] = ()) -> Loose:
    result: list[Loose] = []
    case(seed, lambda frames: result.append(copy.deepcopy(strip(loose(frames, known)))))
    return result[0]


def strip(state: Loose) -> Loose:
    """Without this file's globals."""
    state.tensors = {path: t.detach() for path, t in state.tensors.items() if "<module>" not in path}
    state.scalars = {path: value for path, value in state.scalars.items() if "<module>" not in path}
    return state


def round_trip(case: Callable[..., Any]) -> tuple[Any, Any, list[str]]:
    """(what the case returns undisturbed, what it returns from other values after the injection, what differed)."""
    states: list[Loose] = []
    changed: list[str] = []
    expected = case(1.0, lambda frames: states.append(copy.deepcopy(strip(loose(frames, ())))))
    state = states[0]
    got = case(
        2.0, lambda frames: changed.extend(inject(frames, state.tensors, state.scalars, (), state.aliases))
    )
    return expected, got, [path for path in changed if "<module>" not in path]


@dataclass
class Meter:
    sum: Any
    count: int = 0


@dataclass(frozen=True)
class Frozen:
    value: Any


class Slotted:
    __slots__ = ("count", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.count = 3


class Pair(NamedTuple):
    a: Any
    b: Any


class Named(dict):  # type: ignore[type-arg]
    extra: Any


def named(value: Any) -> Named:
    it = Named(a=1)
    it.extra = value
    return it


def closure(value: Any) -> Callable[[], Any]:
    def read() -> Any:
        return value

    return read


def generator(value: Any) -> Iterator[Any]:
    for _ in range(3):
        yield value


def started(value: Any) -> Iterator[Any]:
    it = generator(value)
    next(it)
    return it


class Owner:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


def keyed(value: Any) -> dict[Any, Any]:
    return {object(): 1, (1, 2): value}


def module_attribute(value: Any) -> nn.Module:
    class Net(nn.Module):
        pass

    net = Net()
    net.ema = {"w": value}  # type: ignore[assignment]
    return net


def parameter(value: torch.Tensor) -> nn.Module:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data = value.reshape(1, 1)
    return layer


CONTAINERS: list[tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = [
    (lambda t: t, lambda x: x, ""),
    (lambda t: [1.0, t, 2.0], lambda x: x[1], "[1]"),
    (lambda t: [0.5] * 1000 + [t], lambda x: x[1000], "[1000]"),
    (lambda t: (1, (t,)), lambda x: x[1][0], "[1][0]"),
    (lambda t: Pair(1, t), lambda x: x.b, "[1]"),
    (lambda t: {"loss": t}, lambda x: x["loss"], "['loss']"),
    (lambda t: {3: [t]}, lambda x: x[3][0], "[3][0]"),
    (keyed, lambda x: x[1, 2], "[#1]"),
    (lambda t: OrderedDict(a=t), lambda x: x["a"], "['a']"),
    (lambda t: defaultdict(list, a=[t]), lambda x: x["a"][0], "['a'][0]"),
    (lambda t: deque([1, t], maxlen=3), lambda x: x[1], "[1]"),
    (lambda t: Meter(t), lambda x: x.sum, ".sum"),
    (lambda t: Frozen(t), lambda x: x.value, ".value"),
    (lambda t: {"m": Meter({"x": t})}, lambda x: x["m"].sum["x"], "['m'].sum['x']"),
    (Slotted, lambda x: x.value, ".value"),
    (lambda t: SimpleNamespace(v=t), lambda x: x.v, ".v"),
    (named, lambda x: x.extra, ".extra"),
    (closure, lambda x: x(), ".<closure 0>"),
    (lambda t: Owner(t).method, lambda x: x(), ".__self__.value"),
    (lambda t: functools.partial(max, t), lambda x: x.args[0], ".args[0]"),
    (lambda t: functools.partial(dict, k=t), lambda x: x()["k"], ".keywords['k']"),
    (generator, lambda x: next(iter(x)), ".gi_frame/value"),
    (started, lambda x: next(iter(x)), ".gi_frame/value"),
    (lambda t: iter([t]), lambda x: next(iter(x)), ".<rest 0>[0]"),
    (module_attribute, lambda x: x.ema["w"], ".ema['w']"),
    (parameter, lambda x: x.weight, ".weight"),
    (lambda t: nn.Sequential(nn.Tanh(), parameter(t)), lambda x: x[1].weight, ".1.weight"),
]


@pytest.mark.parametrize("number", range(len(CONTAINERS)))
def test_each_container(number: int) -> None:
    make, read, suffix = CONTAINERS[number]

    def case(seed: float, then: Any) -> Any:
        held = make(torch.full((1, 1), seed))
        pause(then)
        return read(held).detach().clone()

    assert list(found(case).tensors) == [f"{HERE}:case/held{suffix}"]
    expected, got, changed = round_trip(case)
    assert torch.equal(expected, got)
    assert changed == [f"{HERE}:case/held{suffix}"]


REPLACED = [
    number
    for number, (_, _, suffix) in enumerate(CONTAINERS)
    if not any(part in suffix for part in ("args", "gi_frame", "weight"))
]


@pytest.mark.parametrize("number", REPLACED)
def test_another_shape_replaces_the_tensor_where_it_lies(number: int) -> None:
    make, read, _ = CONTAINERS[number]

    def case(seed: float, then: Any) -> Any:
        held = make(torch.full((int(seed),), seed))
        pause(then)
        return read(held).clone()

    expected, got, changed = round_trip(case)
    assert torch.equal(expected, got)
    assert len(changed) == 1
    assert "missing" not in changed[0]


def test_a_place_that_cannot_be_set_is_told() -> None:
    def case(seed: float, then: Any) -> Any:
        held = functools.partial(max, torch.full((int(seed),), seed))
        pause(then)
        return held

    assert round_trip(case)[2] == [f"{HERE}:case/held.args[0] (missing)"]


def test_only_live_locals_count_and_scalars_are_set() -> None:
    def case(seed: float, then: Any) -> Any:
        dead = torch.ones(3)
        total, best, meter, name = seed * 0.1, None if seed == 1 else seed, Meter(0, int(seed)), f"s{seed}"
        config = {"lr": seed}
        items = [seed]
        pause(then)
        dead = torch.zeros(1)
        return total, best, meter, name, config, items, dead

    state = found(case)
    assert not state.tensors
    prefix = f"{HERE}:case/"
    assert state.scalars.items() >= {f"{prefix}total": 0.1, f"{prefix}best": None, f"{prefix}meter.count": 1}.items()
    assert f"{prefix}items[0]" not in state.scalars
    expected, got, changed = round_trip(case)
    assert got[:5] == expected[:5]
    assert f"{prefix}total" in changed


def test_identity_graph_and_leaf_gradients_are_kept() -> None:
    def case(seed: float, then: Any) -> Any:
        weight = torch.full((2,), seed, requires_grad=True)
        weight.grad = torch.full((2,), seed * 10)
        loss = (weight * weight).sum()
        same = weight
        pause(then)
        loss.backward()
        assert same is weight
        return weight.grad.clone()

    state = found(case)
    prefix = f"{HERE}:case/"
    assert set(state.tensors) == {f"{prefix}loss", f"{prefix}same", f"{prefix}same.grad"}
    assert state.aliases == {f"{prefix}weight": f"{prefix}same"}
    expected, got, _ = round_trip(case)
    assert torch.equal(expected, got)


def test_an_alias_that_is_none_here_is_made_one_and_the_reverse() -> None:
    def case(seed: float, then: Any) -> Any:
        a = torch.full((2,), seed)
        b = a if seed == 1 else torch.full((2,), 5.0)
        c = torch.full((2,), 7.0) if seed == 1 else a
        pause(then)
        a += 1
        return a.clone(), b.clone(), c.clone()

    expected, got, changed = round_trip(case)
    assert all(map(torch.equal, expected, got))
    assert not any("missing" in path for path in changed)


def test_views_that_share_memory_only_here_are_separated() -> None:
    def case(seed: float, then: Any) -> Any:
        base = torch.full((4,), seed)
        part = base[:2] if seed == 2 else torch.full((2,), 9.0)
        expanded = torch.tensor(seed).expand(3) if seed == 2 else torch.arange(3.0)
        pause(then)
        return base.clone(), part.clone(), expanded.clone()

    expected, got, _ = round_trip(case)
    assert all(map(torch.equal, expected, got))


def test_a_view_stays_a_view() -> None:
    def case(seed: float, then: Any) -> Any:
        base = torch.full((4,), seed)
        part = base[:2]
        pause(then)
        part += 1
        return base.clone(), part.clone()

    expected, got, _ = round_trip(case)
    assert all(map(torch.equal, expected, got))


def test_known_parameters_are_left_out_and_an_ema_copy_is_not() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    known = {id(t) for t in (*net.parameters(), *net.buffers())}

    def case(seed: float, then: Any, model: nn.Module = net) -> Any:
        optimizer = torch.optim.Adam(model.parameters())
        ema = copy.deepcopy(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        pause(then)
        return model, ema, optimizer, average

    state = found(case, known=known)
    paths = {path.removeprefix(f"{HERE}:case/") for path in state.tensors}
    assert {"ema.0.weight", "ema.1.running_mean", "average.n_averaged", "average.module.0.bias"} <= paths
    assert not any(path.startswith(("model", "optimizer")) for path in paths)
    by_module = found(case, known={id(module) for module in net.modules()})
    assert by_module.tensors.keys() == state.tensors.keys()


def test_a_trainer_and_its_frames_by_depth() -> None:
    class Trainer:
        def __init__(self, seed: float) -> None:
            self.meters = {"loss": Meter(torch.tensor(seed)), "n": Meter(seed)}
            self.history = [torch.tensor(seed * i) for i in range(3)]

        def case(self, depth: int, then: Any) -> Any:
            local = torch.tensor(self.history[1].item() + depth)
            if depth:
                self.case(depth - 1, then)
            else:
                pause(then)
            self.history.append(local)
            return None

    def case_main(seed: float, then: Any) -> Any:
        trainer = Trainer(seed)
        trainer.case(1, then)
        return torch.stack([*trainer.history, trainer.meters["loss"].sum])

    state = found(case_main)
    assert {f"{HERE}:case_main/trainer.meters['loss'].sum", f"{HERE}:case/local", f"{HERE}:case#2/local"} <= set(
        state.tensors
    )
    expected, got, _ = round_trip(case_main)
    assert torch.equal(expected, got)


def test_nonlocal_variables() -> None:
    def case(seed: float, then: Any) -> Any:
        running = torch.full((int(seed),), seed)
        count = int(seed)

        def case_inner() -> None:
            nonlocal running, count
            pause(then)
            running = running + 1
            count += 1

        case_inner()
        return running.clone(), torch.tensor(count)

    expected, got, changed = round_trip(case)
    assert all(map(torch.equal, expected, got))
    assert not any("missing" in path for path in changed)


SCRIPT = """
import torch
running = torch.full((int(seed),), seed)
meters = {"loss": [torch.tensor(seed)]}
dead = torch.ones(1)
steps = int(seed)
def read():
    return hidden
hidden = torch.tensor(seed)
for step in range(1):
    pause()
    running = running + 1
result = [running, meters["loss"][0], read(), torch.tensor(steps)]
"""


def test_a_script_at_module_level() -> None:
    def run(seed: float, then: Callable[[list[FrameType]], Any]) -> Any:
        space = {
            "__name__": "__main__",
            "__file__": "/x/train.py",
            "seed": seed,
            "pause": lambda: then([f for f in walk.user_frames(sys._getframe()) if "/x/" in f.f_code.co_filename]),
        }
        exec(compile(SCRIPT, "/x/train.py", "exec"), space)
        return space["result"]

    states: list[Loose] = []
    expected = run(1.0, lambda frames: states.append(copy.deepcopy(loose(frames, ()))))
    prefix = "train.py:<module>/"
    assert set(states[0].tensors) == {f"{prefix}running", f"{prefix}meters['loss'][0]", f"{prefix}hidden"}
    changed: list[str] = []
    got = run(2.0, lambda frames: changed.extend(inject(frames, states[0].tensors, states[0].scalars)))
    assert all(map(torch.equal, expected, got))
    assert not any("missing" in path for path in changed)


def test_what_exists_on_one_side_only_is_told() -> None:
    def case(seed: float, then: Any) -> Any:
        held = [torch.tensor(1.0)] * 1 if seed == 1 else [1.0, torch.tensor(1.0)]
        pause(then)
        return held

    assert round_trip(case)[2] == [f"{HERE}:case/held[0] (missing)", f"{HERE}:case/held[1] (missing)"]


def test_equal_states_differ_in_nothing() -> None:
    def case(_: float, then: Any) -> Any:
        held, ratio = [torch.tensor(float("nan"))], float("nan")
        pause(then)
        return held, ratio

    assert round_trip(case)[2] == []


def test_minus_zero_is_another_value() -> None:
    def case(seed: float, then: Any) -> Any:
        held = torch.tensor(-0.0 if seed == 1 else 0.0)
        number = -0.0 if seed == 1 else 0.0
        pause(then)
        return held, torch.tensor(number)

    expected, got, changed = round_trip(case)
    assert changed == [f"{HERE}:case/held", f"{HERE}:case/number"]
    assert str(expected) == str(got)


def test_the_limit_names_its_place() -> None:
    def case(seed: float, then: Any) -> Any:
        held = [Meter(torch.tensor(seed)) for _ in range(100)]
        pause(then)
        return held

    result: list[Loose] = []
    case(1.0, lambda frames: result.append(loose(frames, (), limit=50)))
    assert result[0].truncated is not None
    assert result[0].truncated.startswith(f"{HERE}:case/held")


def test_whose_code() -> None:
    assert walk._is_users_file(__file__)
    assert not walk._is_users_file(torch.__file__)
    assert not walk._is_users_file(types.__file__)
    assert not walk._is_users_file(walk.__file__)


def test_a_typical_script_costs_little() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.losses, self.accuracies = [0.5] * 1000, [0.25] * 1000
            self.meters = {name: Meter(0.0) for name in ("loss", "acc", "time")}
            self.best, self.patience, self.name = 0.1, 3, "run"

    def case(then: Any) -> Any:
        a, b, c, d, e, f, g, h = range(8)
        trainer, model = Trainer(), nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)])
        running, history = torch.zeros(()), [1.0] * 1000
        known = {id(t) for t in (*model.parameters(), *model.modules())}
        seconds = pause(lambda frames: then(frames, known))
        return seconds, a, b, c, d, e, f, g, h, trainer, model, running, history

    def timed(frames: list[FrameType], known: set[int]) -> float:
        def once() -> float:
            start = time.perf_counter()
            loose(frames, known)
            return time.perf_counter() - start

        return min(once() for _ in range(200))

    seconds = case(timed)[0]
    print(f"{seconds * 1e6:.0f} µs")
    assert seconds < 1e-3  # the aim is 150 µs; a busy machine may take longer

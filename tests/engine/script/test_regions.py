"""Models, backward passes, optimizers and scalers as regions: what runs live, and what stands for it in a newcomer.

The patches are for a whole process, so a process of its own runs the training: once plainly, once live, and once as a
newcomer with the tape of the second.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, cast

import pytest
import torch

from tpwrap.engine.script import shapes
from tpwrap.engine.script.boundary import Boundary
from tpwrap.engine.script.regions import Regions
from tpwrap.engine.script.tape import Tape

PROGRAM = r"""
import json, sys, warnings
import torch
from torch import nn
from tpwrap.engine.script import crossings, shapes
from tpwrap.engine.script.boundary import Boundary, Mode
from tpwrap.engine.script.regions import Regions
from tpwrap.engine.script.tape import Tape

warnings.simplefilter("ignore")


def fail(reason):
    raise RuntimeError(reason)


class Recorder:
    # The engine's side as Regions asks it: what is to be run, and what was.
    def __init__(self):
        self.step, self.in_scaler, self.phases, self.found, self.forward = 0, False, [], [], 0

    def at(self, phase):
        self.phases.append(phase)

    def model_found(self, model):
        self.found.append(type(model).__name__)

    def before_backward(self, roots):
        self.phases.append("backward")
        regions.no_updates()
        return boundary.mode is Mode.LIVE

    def after_stubbed_backward(self, roots):
        self.phases.append("stubbed")

    class window:
        @staticmethod
        def is_true(value):
            pass

    def on_update(self, optimizer, update, args, kwargs):
        self.phases.append("update")
        regions.updated(regions.optimizers.index(optimizer))
        self.step += 1
        boundary.enter()
        try:
            if boundary.mode is Mode.LIVE:
                return update(*args, **kwargs)
            optimizer._opt_called = True
        finally:
            boundary.leave()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.a(x)
        return {"logits": self.b(y), "hidden": (y, 3)}


def train(scaled=False, inf=-1):
    torch.manual_seed(1)
    model, criterion = Net(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=4.0, growth_interval=2)
    seen = []
    for step in range(5):
        output = model(torch.full((3, 4), float(step)))
        loss = criterion(output["logits"], torch.ones(3, 2)) * (float("inf") if step == inf else 1.0)
        (norm,) = torch.autograd.grad(loss, [output["logits"]], retain_graph=True)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        graded = all(p.grad is not None for p in model.parameters())
        scaler.unscale_(optimizer)
        clipped = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        seen.append([
            loss.item(), output["hidden"][1], list(output["hidden"][0].shape), list(norm.shape), graded,
            clipped.item(), scheduler.get_last_lr(), scaler.get_scale(), output["logits"].requires_grad,
        ])
        with torch.no_grad():
            seen.append(model(torch.ones(1, 4))["logits"].requires_grad)
    return seen, model.calls, [p.tolist() for p in model.parameters()]


asked = json.load(sys.stdin)
plain = train(**asked)
script, boundary, table = Recorder(), Boundary(Tape(), fail), shapes.Table()
boundary.mode = Mode.OFF
regions = Regions(boundary, table, script)
crossings.install(boundary, lambda place: None)
regions.install()


def observed(mode, tape):
    global script
    regions.__init__(boundary, shapes.Table(), script)
    script.__init__()
    boundary.__init__(tape, fail)
    boundary.mode = mode
    try:
        seen, calls, weights = train(**asked)
    finally:
        boundary.mode = Mode.OFF
    return {
        "seen": seen, "calls": calls, "weights": weights, "phases": script.phases, "found": script.found,
        "steps": script.step, "models": len(regions.models), "optimizers": len(regions.optimizers),
        "scalers": len(regions.scalers), "schedulers": len(regions.schedulers), "regions": boundary.regions,
        "inside": boundary.inside,
    }


tape = Tape()
live = observed(Mode.LIVE, tape)
end, closed = tape.seal()
tape = Tape()
tape.load([closed] if closed else [], end)
newcomer = observed(Mode.FORWARD, tape)
json.dump({"plain": plain, "live": live, "newcomer": newcomer, "left": tape.left}, sys.stdout)
"""


@pytest.fixture(scope="module", params=[{}, {"scaled": True}, {"scaled": True, "inf": 2}], ids=json.dumps)
def trained(request: pytest.FixtureRequest) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(request.param),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found["asked"] = request.param
    return found


def test_a_live_training_is_what_it_is_without_us(trained: dict[str, Any]) -> None:
    seen, calls, weights = trained["plain"]
    live = trained["live"]
    assert repr(live["seen"]) == repr(seen)
    assert (live["calls"], live["weights"]) == (calls, weights)


def test_a_newcomers_script_sees_the_same_without_training(trained: dict[str, Any]) -> None:
    live, newcomer = trained["live"], trained["newcomer"]
    assert repr(newcomer["seen"]) == repr(live["seen"])
    assert newcomer["calls"] == 0
    assert trained["left"] == 0


def test_it_goes_through_the_same_regions_and_updates(trained: dict[str, Any]) -> None:
    live, newcomer = trained["live"], trained["newcomer"]
    updates = 4 if "inf" in trained["asked"] else 5  # the scaler leaves one out
    for one in (live, newcomer):
        assert one["steps"] == updates
        assert one["found"] == ["Net"]
        assert (one["models"], one["optimizers"], one["schedulers"]) == (1, 1, 1)
        assert one["inside"] == 0
    assert newcomer["regions"] == live["regions"]
    assert live["phases"].count("forward") == 10
    assert newcomer["phases"].count("forward") == 0
    assert newcomer["phases"].count("stubbed") == newcomer["phases"].count("backward") == 5
    order = [phase for phase in live["phases"] if phase in ("backward", "update")]
    assert [phase for phase in newcomer["phases"] if phase != "stubbed"] == order


# --- what needs no patches --------------------------------------------------------------------------------


def made() -> Regions:
    def fail(reason: str) -> Any:
        raise AssertionError(reason)

    return Regions(Boundary(Tape(), fail), shapes.Table(), cast(Any, None))


@pytest.mark.parametrize(
    ("rows", "row", "waiting"),
    [
        ([], [], []),
        ([[0]], [0], []),
        ([[0, 1]], [0], [1]),
        ([[0, 1]], [0, 1], []),
        ([[0, 1]], [1], []),
        ([[0, 1, 2]], [0], [1, 2]),
        ([[0, 1, 2]], [0, 1], [2]),
        ([[0], [1]], [0], []),  # another backward pass is between them
        ([[0, 1], [0]], [0], [1]),
    ],
)
def test_optimizers_that_follow_without_a_backward_pass(
    rows: list[list[int]], row: list[int], waiting: list[int]
) -> None:
    regions = made()
    for one in [*rows, row]:
        regions.no_updates()
        assert not regions.has_updated
        assert regions.waiting() == []
        for index in one:
            regions.updated(index)
    assert regions.has_updated == bool(row)
    assert regions.waiting() == waiting


def test_models_that_no_optimizer_updates() -> None:
    regions = made()
    net, teacher, half = (torch.nn.Linear(2, 2) for _ in range(3))
    regions.optimizers.append(torch.optim.SGD([*net.parameters(), half.bias], lr=0.1))
    assert regions.trained(net)
    assert regions.trained(half)
    assert not regions.trained(teacher)
    assert not regions.trained(torch.nn.ReLU())


def test_modules_with_parameters_are_regions_unless_seen_through() -> None:
    regions = made()
    net, loss = torch.nn.Linear(2, 2), torch.nn.MSELoss()
    assert regions._trains(net)
    assert not regions._trains(loss)
    regions.see_through(net, True)
    assert not regions._trains(net)
    regions.see_through(net, False)
    assert regions._trains(net)


def test_a_module_without_ddp_need_not_run() -> None:
    assert not made().for_real(torch.nn.Linear(2, 2))


def test_scales_are_the_scalers_tensors() -> None:
    regions = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # type: ignore[attr-defined]
    scaler.scale(torch.ones(1))
    regions.scalers.append(scaler)
    assert [float(one) for one in regions.scales()] == [4.0, 0.0]

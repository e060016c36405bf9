"""Replicated state of scripts with several models, optimizers, schedulers, scalers and loose tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tpwrap.engine import transfer
from tpwrap.engine.state import ReplicaState, StateError
from tpwrap.engine.transfer import Offer, StateServer

KEY = b"k" * 32


def moved(source: ReplicaState, newcomer: ReplicaState) -> None:
    """All of `source` goes to `newcomer`, over a real connection; afterwards nothing differs."""
    server = StateServer("127.0.0.1", KEY)
    server.offer(Offer(0, 0, source, source.scalars()))
    transfer.restore(newcomer, [server.address], KEY, 0, 0, 10.0, lambda: False)
    server.withdraw(1)
    assert newcomer.manifest() == source.manifest()
    assert newcomer.digests() == source.digests()
    assert newcomer.scalars() == source.scalars()


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    width = next(model.parameters()).shape[-1]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.linspace(-1, 1, 4 * width).reshape(4, width)) ** 2).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


class Gan:
    """Two models, two optimizers, a scheduler each, a scaler, and an EMA copy."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.generator = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.critic = nn.Linear(6, 1)
        self.critic.bias.requires_grad_(False)
        self.first = torch.optim.Adam(self.generator.parameters(), lr=0.1 * seed)
        self.second = torch.optim.SGD([self.critic.weight], lr=0.1, momentum=0.9)
        self.decay = torch.optim.lr_scheduler.LambdaLR(self.first, lambda step: 1 / (1 + step))
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.second, patience=1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.ema = {name: tensor.clone() for name, tensor in self.generator.state_dict().items()}
        self.state = ReplicaState.of(
            {"generator": self.generator, "critic": self.critic},
            {"first": self.first, "second": self.second},
            {"decay": self.decay, "plateau": self.plateau, "scaler": self.scaler},
            lambda: {f"ema.{name}": tensor for name, tensor in self.ema.items()},
        )

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.first.zero_grad()
            self.second.zero_grad()
            data = torch.linspace(-1, 1, 24).reshape(4, 6) * (step + 1)
            loss = (self.critic(self.generator(data)) ** 2).mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.first)
            self.scaler.step(self.second)
            self.scaler.update()
            self.decay.step()
            self.plateau.step(1.0)
            for name, tensor in self.generator.state_dict().items():
                self.ema[name].copy_(tensor)


def test_a_newcomer_trains_on_with_all_of_them() -> None:
    replica, newcomer = Gan(1), Gan(2)
    replica.train(7)
    moved(replica.state, newcomer.state)
    assert newcomer.first.param_groups[0]["lr"] == replica.first.param_groups[0]["lr"] != 0.2
    assert newcomer.scaler.state_dict() == replica.scaler.state_dict()
    assert newcomer.scaler.get_scale() == 16.0
    assert newcomer.plateau.state_dict() == replica.plateau.state_dict()
    for name, tensor in replica.ema.items():
        assert torch.equal(newcomer.ema[name], tensor)
    newcomer.generator.load_state_dict(replica.generator.state_dict())  # buffers are the sidecar's
    for gan in (replica, newcomer):
        gan.train(7)
    assert newcomer.state.digests() == replica.state.digests()
    assert newcomer.state.scalars() == replica.state.scalars()


def test_names_say_what_they_are_and_buffers_are_left_out() -> None:
    gan = Gan(1)
    gan.train(1)
    names = list(gan.state.tensors())
    assert "generator/1.weight" in names
    assert "critic/bias" in names  # frozen, and in no optimizer
    assert "first/0.0/exp_avg" in names
    assert "second/0.0/momentum_buffer" in names
    assert "extra/ema.1.running_mean" in names
    assert not [name for name in names if "running" in name and not name.startswith("extra/")]


def test_the_two_line_apis_state_has_the_names_that_it_had() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    learn(model, optimizer, 1)
    alone = ReplicaState(model, optimizer, None)
    keys = ("step", "exp_avg", "exp_avg_sq")  # as the optimizer has made them
    of_optimizer = [f"optimizer/0.{place}/{key}" for place in (0, 1) for key in keys]
    assert list(alone.tensors()) == ["model/weight", "model/bias", *of_optimizer]
    same = ReplicaState.of({"model": model}, {"optimizer": optimizer}, {})
    assert same.digests() == alone.digests()
    assert same.scalars() == alone.scalars()


def test_a_parameter_that_two_models_reach_is_moved_once() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    encoder = nn.Linear(3, 3)
    first, second = nn.Sequential(encoder, nn.Linear(3, 1)), nn.Sequential(encoder, nn.Linear(3, 2))
    state = ReplicaState.of({"ddp": Wrapper(first), "first": first, "second": second}, {}, {})
    assert list(state.tensors()) == [
        "ddp/module.0.weight",
        "ddp/module.0.bias",
        "ddp/module.1.weight",
        "ddp/module.1.bias",
        "second/1.weight",
        "second/1.bias",
    ]


class Momentum(torch.optim.Optimizer):
    """Keeps a count and a mean of its own, under names that are no parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        self.state["updates"] = self.state.get("updates", 0) + 1
        self.state["history"] = [*self.state.get("history", []), torch.tensor(float(self.state["updates"]))]
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = group["lr"] / self.state["updates"] + 0.001 * float(sum(self.state["history"]))
                parameter.data.sub_(scale * parameter.grad)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd without momentum": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "adamw, learning rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.3),
    "rprop": torch.optim.Rprop,
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=3, history_size=4),
    "entries that belong to no parameter": Momentum,
}


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "has trained otherwise"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_newcomer_trains_on_with_any_optimizer(kind: str, fresh: bool) -> None:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        made.append((model, OPTIMIZERS[kind](model.parameters())))
    states = [ReplicaState.of({"net": model}, {"opt": optimizer}, {}) for model, optimizer in made]
    learn(*made[0], 4)
    learn(*made[1], 0 if fresh else 2)
    moved(*states)
    for model, optimizer in made:
        learn(model, optimizer, 4)
    assert states[1].digests() == states[0].digests()
    assert states[1].scalars() == states[0].scalars()


def test_what_only_the_newcomer_holds_is_dropped() -> None:
    made = []
    for _ in range(2):
        model = nn.Linear(3, 1)
        made.append((model, torch.optim.LBFGS(model.parameters(), max_iter=2)))
    learn(*made[1], 3)
    states = [ReplicaState.of({"net": model}, {"opt": optimizer}, {}) for model, optimizer in made]
    moved(*states)
    assert not any(made[1][1].state.values())


def test_what_is_allocated_lives_where_the_replica_keeps_it() -> None:
    """Counters on the CPU, all else beside the parameter, whatever its shape (a device without memory stands for one
    with)."""
    states = []
    for _ in range(2):
        model = nn.Conv2d(3, 4, 2, device="meta").to(memory_format=torch.channels_last)
        states.append(ReplicaState.of({"net": model}, {"opt": torch.optim.Adafactor(model.parameters())}, {}))
    source, newcomer = states
    weight = source.models["net"].weight
    source.optimizers["opt"].state[weight] = {
        "step": torch.tensor(3.0),
        "row_var": torch.empty(4, 1, device="meta"),
        "momentum": torch.empty_like(weight),
        "generation": torch.empty((), dtype=torch.int32, device="meta"),
    }
    newcomer.allocate(source.manifest())
    made = newcomer.optimizers["opt"].state[newcomer.models["net"].weight]
    assert {key: value.device.type for key, value in made.items()} == {
        "step": "cpu",
        "row_var": "meta",
        "momentum": "meta",
        "generation": "meta",
    }
    assert made["momentum"].stride() == weight.stride()
    assert newcomer.manifest() == source.manifest()


def with_tensors(**tensors: torch.Tensor) -> ReplicaState:
    return ReplicaState.of({}, {}, {}, lambda: tensors)


def test_loose_tensors_are_written_in_place_whatever_their_layout() -> None:
    def make(fill: float) -> dict[str, torch.Tensor]:
        return {
            "best": torch.full((3, 4), fill, dtype=torch.bfloat16),
            "count": torch.tensor(int(fill)),
            "empty": torch.empty(0, 3),
            "images": torch.full((2, 3, 4, 4), fill).to(memory_format=torch.channels_last),
            "mask": torch.tensor([fill > 2, True]),
            "shadow": torch.full((4, 3), fill, requires_grad=True).t(),
        }

    mine, theirs = make(7.0), make(1.0)
    moved(with_tensors(**theirs), with_tensors(**mine))
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor)
        assert mine[name].stride() == make(0.0)[name].stride()


def test_a_loose_tensor_that_one_side_lacks_or_has_otherwise_is_named() -> None:
    one = torch.zeros(2)
    with pytest.raises(StateError, match=r"extra/ema\.w is missing here, but \[2\] float32 on its replicas"):
        with_tensors().allocate(with_tensors(**{"ema.w": one}).manifest())
    with pytest.raises(StateError, match=r"extra/ema\.w exists here but not on its replicas"):
        with_tensors(**{"ema.w": one}).allocate([])
    with pytest.raises(StateError, match=r"extra/best is \[2\] torch.float64 here, but \[2\] float32 on its replicas"):
        with_tensors(best=one.double()).allocate(with_tensors(best=one).manifest())


def test_other_models_optimizers_and_schedulers_are_named() -> None:
    def make(models: str = "ab", optimizers: str = "o", schedulers: str = "s", groups: int = 1, size: int = 2) -> Any:
        modules = {name: nn.Linear(2, 2) for name in models}
        loose = [nn.Parameter(torch.zeros(1)) for _ in range(size)]
        split = [{"params": loose}] if groups == 1 else [{"params": [one]} for one in loose]
        made = {name: torch.optim.SGD(copy.copy(split)) for name in optimizers}
        some = next(iter(made.values()))
        return ReplicaState.of(modules, made, {name: torch.optim.lr_scheduler.StepLR(some, 1) for name in schedulers})

    source = make()
    with pytest.raises(StateError, match=r"b/weight is missing here"):
        make(models="a").allocate(source.manifest())
    with pytest.raises(StateError, match=r"c/(weight|bias) exists here"):
        make(models="abc").allocate(source.manifest())
    for other, problem in (
        (make(optimizers="op"), "the optimizers are o, p here, but o on the replicas"),
        (make(schedulers=""), "the schedulers are none here, but s on the replicas"),
        (make(groups=2), "the o has 2 param_groups here and 1 on its replicas"),
        (make(size=3), "the o has 3 parameters here and 2 on its replicas"),
    ):
        with pytest.raises(StateError, match=problem):
            other.restore_scalars(source.scalars())


@pytest.mark.parametrize("models", [{"extra": nn.Linear(1, 1)}, {"a/b": nn.Linear(1, 1)}, {"o": nn.Linear(1, 1)}])
def test_names_that_would_be_ambiguous_are_refused(models: dict[str, nn.Module]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="cannot name a model or an optimizer"):
        ReplicaState.of(models, {"o": optimizer}, {})


class Opaque:
    pass


def test_what_cannot_be_moved_disturbs_no_training_but_is_told_to_the_newcomer() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = ReplicaState.of({}, {"o": optimizer}, {"s": scheduler})
    for place, name in (
        (optimizer.state[weight], "o/0.0/thing"),
        (optimizer.state, "o/thing"),
        (optimizer.param_groups[0], "o/0/thing"),
        (vars(scheduler), "s/thing"),
    ):
        place["thing"] = Opaque()
        with pytest.raises(StateError, match=f"{name} of the replicas is a Opaque, which cannot be moved"):
            state.restore_scalars(state.scalars())
        del place["thing"]
        state.restore_scalars(state.scalars())


def test_functions_in_schedulers_and_param_groups_are_code_and_stay() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.shape = [math.cos, {"other": math.sin}]  # type: ignore[attr-defined]
    optimizer.param_groups[0]["project"] = math.floor
    state = ReplicaState.of({}, {"o": optimizer}, {"s": scheduler})
    state.restore_scalars(state.scalars())
    assert scheduler.shape == [math.cos, {"other": math.sin}]  # type: ignore[attr-defined]


class WarmUp(torch.optim.lr_scheduler.LRScheduler):
    """Holds another scheduler, which takes over: a pattern that many scripts copy."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: Any) -> None:
        self.after_scheduler = after
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch > 2:
            self.after_scheduler.step()
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: WarmUp(o, torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3, scale_fn=lambda x: 1 / (x + 1)),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[4],
        ),
        lambda o: torch.optim.lr_scheduler.ChainedScheduler(
            [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.9**s)]
        ),
    ],
    ids=["one inside another", "one cycle", "cyclic", "sequential", "chained"],
)
def test_a_newcomers_learning_rate_goes_on_as_its_replicas(make: Callable[[Any], Any]) -> None:
    made = []
    for _ in range(2):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
        made.append((optimizer, make(optimizer)))

    def go_on(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    go_on(*made[0], 6)
    moved(*(ReplicaState.of({}, {"o": optimizer}, {"s": scheduler}) for optimizer, scheduler in made))
    ahead = go_on(*made[0], 8)
    assert len(set(ahead)) > 1
    assert go_on(*made[1], 8) == ahead

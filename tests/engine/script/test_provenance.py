"""Where tensors come from, followed through what the script does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tpwrap.engine.script.provenance import Origin, Provenance

OWN, REPLICATED, LOST = Origin.OWN, Origin.REPLICATED, Origin.LOST


class Traced:
    """A newcomer in its window: one tensor of each origin."""

    def __init__(self, synchronized: bool = True, default: Origin = Origin.LOST) -> None:
        self.own = torch.ones(3)
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.weight.grad = torch.ones(3)
        self.lost = torch.ones(3)
        self.provenance = Provenance([self.own], [self.weight], [self.weight] if synchronized else [], default)

    def origin(self, *values: Any) -> Origin:
        return self.provenance.origin(*values)


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    made.provenance.start()
    try:
        yield made
    finally:
        made.provenance.stop()


CASES: dict[str, tuple[Callable[[Traced], Any], Origin]] = {
    "own": (lambda t: t.own, OWN),
    "weight": (lambda t: t.weight, REPLICATED),
    "unknown": (lambda t: t.lost, LOST),
    "arithmetic of own": (lambda t: (t.own * 2 + 1) / t.own, OWN),
    "arithmetic of weights": (lambda t: 1 - t.weight, REPLICATED),
    "own and weight": (lambda t: t.own + t.weight, REPLICATED),
    "own and lost": (lambda t: t.own + t.lost, LOST),
    "weight and lost": (lambda t: t.weight * t.lost, LOST),
    "from nothing": (lambda t: torch.zeros(3), OWN),
    "from numbers": (lambda t: torch.tensor([1.0, 2.0]), OWN),
    "random": (lambda t: torch.rand(3), OWN),
    "like a lost one": (lambda t: t.lost.clone(), LOST),
    "gradient": (lambda t: t.weight.grad, REPLICATED),
    "norm of a gradient": (lambda t: t.weight.grad.norm(), REPLICATED),
    "data": (lambda t: t.weight.data, REPLICATED),
    "detached": (lambda t: t.weight.detach(), REPLICATED),
    "detached lost": (lambda t: t.lost.detach().clone().double().to("cpu"), LOST),
    "view": (lambda t: t.lost[1:].view(-1), LOST),
    "a list": (lambda t: torch.stack([t.own, t.own.clone()]), OWN),
    "a list with a lost one": (lambda t: torch.stack([t.own, t.lost]), LOST),
    "a list with a weight": (lambda t: torch.cat([t.own, t.weight.detach()]), REPLICATED),
    "many from one": (lambda t: list(t.lost.unbind()), LOST),
    "one of many": (lambda t: t.own.chunk(3)[1], OWN),
    "a named tuple": (lambda t: t.lost.max(dim=0).indices, LOST),
    "clipped": (lambda t: torch.nn.utils.clip_grad_norm_([t.weight], 1.0), REPLICATED),
    "functional": (lambda t: torch.nn.functional.mse_loss(t.own, t.weight), REPLICATED),
    "by keyword": (lambda t: torch.add(input=t.own, other=t.lost), LOST),
    "into out": (lambda t: torch.add(t.own, t.lost, out=torch.empty(3)), LOST),
    "where": (lambda t: torch.where(t.own > 0, t.own, t.lost), LOST),
    "comparison": (lambda t: t.lost > 0, LOST),
    "under no_grad": (lambda t: torch.no_grad()(lambda: t.weight * 2)(), REPLICATED),
}


@pytest.mark.parametrize("name", CASES)
def test_origin(traced: Traced, name: str) -> None:
    make, expected = CASES[name]
    assert traced.origin(make(traced)) is expected


def augmented(t: Traced) -> torch.Tensor:
    t.own += t.lost
    return t.own


def element(t: Traced) -> torch.Tensor:
    t.own[0] = t.lost[0]
    return t.own


def augmented_element(t: Traced) -> torch.Tensor:
    t.own[0] += t.lost[0]
    return t.own


def through_a_view(t: Traced) -> torch.Tensor:
    t.own.view(-1).add_(t.lost)
    return t.own


def through_data(t: Traced) -> torch.Tensor:
    t.own.data = t.lost
    return t.own


def into_out(t: Traced) -> torch.Tensor:
    torch.add(t.lost, 1, out=t.own)
    return t.own


def for_each(t: Traced) -> torch.Tensor:
    torch._foreach_add_([t.own], [t.lost])
    return t.own


INPLACE: dict[str, Callable[[Traced], torch.Tensor]] = {
    "+=": augmented,
    "[] =": element,
    "[] +=": augmented_element,
    "view": through_a_view,
    "data": through_data,
    "out": into_out,
    "foreach": for_each,
    "copy_": lambda t: t.own.copy_(t.lost),
    "mul_": lambda t: t.own.mul_(t.lost),
    "index_copy_": lambda t: t.own.index_copy_(0, torch.tensor([0]), t.lost[:1]),
}


@pytest.mark.parametrize("name", INPLACE)
def test_a_lost_value_put_into_a_tensor_makes_it_lost(traced: Traced, name: str) -> None:
    assert traced.origin(INPLACE[name](traced)) is LOST


def test_a_tensor_that_is_overwritten_is_what_it_is_overwritten_with(traced: Traced) -> None:
    assert traced.origin(traced.lost.clone().copy_(traced.own)) is OWN
    assert traced.origin(traced.lost.clone().zero_()) is OWN
    assert traced.origin(traced.lost.clone().fill_(3.0)) is OWN
    assert traced.origin(traced.own.clone().fill_(traced.lost[0])) is LOST


def test_a_tensor_that_is_overwritten_in_part_is_lost_still(traced: Traced) -> None:
    half = traced.lost.clone()
    half[:1].copy_(traced.own[:1])
    half[:1].zero_()
    assert traced.origin(half) is LOST


def test_gradients_that_nobody_has_synchronized_are_lost_until_a_collective_has() -> None:
    t = Traced(synchronized=False)
    t.provenance.start()
    try:
        gradient = t.weight.grad
        assert gradient is not None
        assert t.origin(gradient.norm()) is LOST
        t.provenance.reduced(gradient)
        assert t.weight.grad is not None
        assert t.origin(t.weight.grad.norm()) is REPLICATED
    finally:
        t.provenance.stop()


def test_a_part_that_a_collective_has_made_equal_says_nothing_of_the_rest(traced: Traced) -> None:
    for lost in (traced.lost, traced.lost * 2):  # not known, and known to be lost
        traced.provenance.reduced(lost[:1])
        assert traced.origin(lost) is LOST
        traced.provenance.reduced(lost)
        assert traced.origin(lost[1:]) is REPLICATED


def test_origin_of_several(traced: Traced) -> None:
    t = traced
    assert t.origin() is OWN
    assert t.origin(1, "a", None) is OWN
    assert t.origin(t.own, [t.own, {"a": (t.weight,)}]) is REPLICATED
    assert t.origin([{"a": (t.weight, t.lost)}], t.own) is LOST


def test_marked_anew(traced: Traced) -> None:
    assert traced.provenance.known(traced.lost) is None
    traced.provenance.mark(traced.lost, REPLICATED)  # a collective has made it equal
    assert traced.provenance.known(traced.lost) is REPLICATED
    assert traced.origin(traced.lost * 2) is REPLICATED


def test_after_the_update_only_gradients_are_lost() -> None:
    t = Traced(synchronized=False, default=OWN)
    t.provenance.start()
    try:
        assert t.origin(t.weight * 2) is OWN
        assert t.origin(t.lost) is OWN
        assert t.origin(t.weight.grad) is LOST
        assert t.weight.grad is not None
        assert t.origin(t.weight.grad.norm() + 1) is LOST
    finally:
        t.provenance.stop()


def test_a_parameter_without_a_gradient_has_none(traced: Traced) -> None:
    traced.weight.grad = None
    assert traced.weight.grad is None


def test_ids_are_not_used_again(traced: Traced) -> None:
    """A tensor made where a known one has been must not inherit its origin."""
    for _ in range(200):
        assert traced.origin(traced.lost + 1) is LOST
        assert traced.origin(traced.own + 1) is OWN


def test_nothing_is_followed_after_stop() -> None:
    t = Traced()
    t.provenance.start()
    assert t.provenance.stop()
    assert torch.overrides._get_current_function_mode() is None
    assert t.provenance.known(t.own) is None
    assert t.provenance.known(t.own * 2) is None


def test_stopped_from_within_a_function_of_torch() -> None:
    """backward() is one that is followed: it runs with the mode taken off the stack, to be put back at its end."""
    t = Traced()
    answers: list[bool] = []
    t.provenance.start()

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            answers.append(t.provenance.stop())
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient

    class Holder(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            answers.append(t.provenance.stop())
            return super().__torch_function__(func, types, args, kwargs or {})

    torch.add(torch.ones(1).as_subclass(Holder), 1)  # in the middle of it, the mode is off the stack
    assert False in answers
    assert t.provenance.known(torch.ones(1) * 2) is None  # idle from then on
    assert t.provenance.stop()
    assert torch.overrides._get_current_function_mode() is None


def test_one_is_followed_by_another() -> None:
    """The engine stops one and starts the next: the order on torch's stack must hold."""
    first, second = Traced(), Traced()
    first.provenance.start()
    second.provenance.start()
    assert not first.provenance.stop()  # it is below
    assert second.provenance.known(second.own * 2) is OWN
    assert second.provenance.stop()
    assert first.provenance.stop()
    assert torch.overrides._get_current_function_mode() is None

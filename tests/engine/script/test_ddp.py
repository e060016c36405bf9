"""What is known of DDP: whether it synchronizes, and that a newcomer's buckets come to be laid out as elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from tpwrap.engine import ddp


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


offline = False


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(DistributedDataParallel, "_ddp_init_helper", DistributedDataParallel._ddp_init_helper)
    monkeypatch.setattr(ddp, "_instances", [])
    ddp.install(lambda: offline)
    yield
    global offline
    offline = False


class Net(nn.Module):
    """Uses its layers in another order than it makes them, so that the order of the gradients matters."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(300, 10)
        self.first = nn.Linear(20, 300)
        self.middle = nn.Linear(300, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.middle(self.first(x)))
        return result


def wrapped(static: bool = False) -> DistributedDataParallel:
    return DistributedDataParallel(Net(), bucket_cap_mb=0.1, static_graph=static)


def passes(model: nn.Module, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2, 20)).sum().backward()


def test_without_ddp_every_backward_pass_counts() -> None:
    assert ddp.will_synchronize()
    assert ddp.layout() == ""


def test_a_backward_pass_within_no_sync_does_not_contribute() -> None:
    model, other = wrapped(), None
    assert ddp.will_synchronize()
    with model.no_sync():
        assert not ddp.will_synchronize()
        other = wrapped()
        assert ddp.will_synchronize()  # another model does
        with other.no_sync():
            assert not ddp.will_synchronize()
    assert ddp.will_synchronize()


def test_an_instance_that_is_gone_is_forgotten() -> None:
    model = wrapped()
    assert len(ddp.instances()) == 1
    with model.no_sync():
        del model
    assert ddp.instances() == []
    assert ddp.will_synchronize()


def test_the_instances_within_a_module_are_found() -> None:
    plain = Net()
    assert ddp.within(plain) == []
    assert not ddp.is_replicated(plain)
    model = wrapped()
    assert ddp.within(model) == [model]
    assert ddp.within(nn.Sequential(nn.Identity(), model)) == [model]
    assert ddp.within(model.module) == []
    assert not ddp.is_replicated(model)


def test_a_replicated_module_makes_its_ddp_at_its_first_forward() -> None:
    model = Net()
    replicate(model)
    assert ddp.is_replicated(model)
    assert ddp.is_replicated(nn.Sequential(model))
    assert ddp.within(model) == []
    passes(model, 1)
    (instance,) = ddp.within(model)
    assert isinstance(instance, DistributedDataParallel)


@pytest.mark.parametrize(("static", "needed"), [(False, 1), (True, 2)])
def test_passes_until_the_order_is_known(static: bool, needed: int) -> None:
    model = wrapped(static)
    assert ddp.passes_needed(model) == needed
    passes(model, needed)
    assert ddp.layout() == ""
    passes(model, 1)
    assert len(ddp.layout()) == 16


def test_rebuilding_is_what_the_next_forward_does() -> None:
    model, by_itself = wrapped(), wrapped()
    passes(model, 1)
    passes(by_itself, 2)
    ddp.rebuild(model)
    ddp.rebuild(model)  # once more changes nothing
    assert model._has_rebuilt_buckets
    first = ddp.layout()
    passes(model, 2)
    assert ddp.layout() == first


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_newcomers_buckets_are_in_the_survivors_phase(
    static: bool, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has run one pass, offline; the survivors `step` of them. Both run further ones."""
    global offline
    torch.manual_seed(1)
    survivor = wrapped(static)
    passes(survivor, step)
    survivors = ddp.layout()
    here = [*ddp._instances]

    monkeypatch.setattr(ddp, "_instances", [])
    offline = True
    newcomer = wrapped(static)
    passes(newcomer, 1)
    ddp.finish_bucket_phase(step)
    offline = False
    if step > ddp.passes_needed(newcomer):
        assert survivors
        assert ddp.layout() == survivors

    passes(newcomer, 2)
    found = ddp.layout()
    monkeypatch.setattr(ddp, "_instances", here)
    passes(survivor, 2)
    assert found
    assert found == ddp.layout()


def test_layouts_that_differ_have_other_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for size in (0.1, 0.5):
        monkeypatch.setattr(ddp, "_instances", [])
        model = DistributedDataParallel(Net(), bucket_cap_mb=size)
        passes(model, 2)
        found.add(ddp.layout())
    assert len(found) == 2
    assert "" not in found

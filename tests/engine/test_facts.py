"""What is recognised of loaders, models and threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from tpwrap.core.lint import Loader, Model, judge, render
from tpwrap.engine.script import facts


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Mine(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([0])


DATA = TensorDataset(torch.zeros(12, 2))


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        (DataLoader(DATA, 4), Loader("map", 12)),
        (DataLoader(DATA, 4, shuffle=True, num_workers=2), Loader("map", 12, 2)),
        (DataLoader(DATA, num_workers=1, persistent_workers=True), Loader("map", 12, 1, True)),
        (DataLoader(DATA, sampler=Mine()), Loader("map", 12, sampler="Mine")),
        (DataLoader(Endless(), sampler=Mine()), Loader("map", None, sampler="Mine")),
        (DataLoader(Stream()), Loader("iterable")),
        ([1, 2], Loader("own")),
    ],
)
def test_loaders(loader: Any, found: Loader) -> None:
    assert facts.loader(loader) == found


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_models(group: None) -> None:
    net = torch.nn.Linear(3, 2)
    assert facts.model(net, "train.py:3") == Model("Linear", 8, where="train.py:3")
    assert facts.model(DistributedDataParallel(net)) == Model("Linear", 8, "DDP")
    assert facts.model(torch.nn.LazyLinear(2)) == Model("LazyLinear", 0)
    mesh = init_device_mesh("cpu", (1,))
    for placement, found in ((Shard(0), "DTensor"), (Replicate(), "")):
        spread = torch.nn.Linear(3, 2, bias=False)
        spread.weight = torch.nn.Parameter(distribute_tensor(spread.weight.detach(), mesh, [placement]))
        assert facts.model(spread) == Model("Linear", 6, "", found)
    assert facts.model(fully_shard(torch.nn.Linear(3, 2), mesh=mesh)).sharded == "FSDP2"


def test_threads() -> None:
    stop = threading.Event()

    def watch() -> None:
        stop.wait()

    before = threading.enumerate()
    own = threading.Thread(target=watch, name="watcher")
    of_a_library = threading.Timer(60, print)
    own.start()
    of_a_library.start()
    try:
        (found,) = facts.threads(before)
        assert found.what == "watcher"
        assert found.where.startswith("test_facts.py:")
        assert facts.threads(threading.enumerate()) == ()
    finally:
        stop.set()
        of_a_library.cancel()
        own.join()


def test_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/train.py"])
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    found = facts.gather(
        step=0,
        world_size=2,
        loaders=[DataLoader(DATA)],
        models=[net],
        optimizers=[optimizer],
        schedulers=[torch.optim.lr_scheduler.StepLR(optimizer, 1)],
        scalers=[torch.amp.GradScaler("cpu", enabled=False)],
        buddies=1,
    )
    assert render(found, judge(found))[:2] == [
        "train.py as it is: 1 loader (12 samples), 1 model (8 parameters), AdamW, StepLR",
        "protected: weights, optimizer, schedule, random state, place in the data, the script's variables",
    ]

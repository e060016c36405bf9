"""Which buffers a sidecar holds."""

from __future__ import annotations

import torch
from torch import nn

from tpwrap.engine.buffers import SMALL, LocalBuffers, named_buffers


class Odd(nn.Module):
    """Shared layers, a shared buffer, one that is None, one that is not saved, nested names with the same ends."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(3)
        self.first = nn.Sequential(nn.Linear(3, 3), norm, nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.ReLU()))
        self.again = norm
        self.layers = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.ModuleList([nn.BatchNorm1d(2)])})
        self.register_buffer("table", torch.zeros(SMALL), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("same", self.first[1].running_mean)
        self.register_module("absent", None)


def test_names_are_those_of_torch() -> None:
    model = Odd()
    ours, theirs = named_buffers(model), dict(model.named_buffers())
    assert list(ours) == list(theirs)
    assert all(ours[name] is theirs[name] for name in ours)
    model.layers["c"] = nn.BatchNorm1d(4)  # put in later
    del model.first[2]
    model.first[1].running_var = torch.ones(3)  # replaced
    assert {n: id(b) for n, b in named_buffers(model).items()} == {n: id(b) for n, b in model.named_buffers()}


def test_a_large_buffer_is_sent_from_its_first_change_on() -> None:
    model = Odd()
    buffers = LocalBuffers(model)
    assert "table" not in buffers.changed()
    model.table[-1] = 1.0
    assert "table" in buffers.changed()
    model.table[-1] = 0.0  # as it was at first, and still it moves
    sent = buffers.changed()
    assert torch.equal(sent["table"], torch.zeros(SMALL))
    other = Odd()
    other.table.fill_(7.0)
    LocalBuffers(other).restore(sent)
    assert all(torch.equal(a, b) for a, b in zip(other.buffers(), model.buffers(), strict=True))

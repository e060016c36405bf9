"""Buffers of the model, which differ from rank to rank (BatchNorm's statistics) and so belong to the sidecar."""

from __future__ import annotations

from typing import Any

import torch

from tpwrap.engine import _native

SMALL = 64 << 10
"""bytes; up to here a buffer is simply published"""


class LocalBuffers:
    """Finds the buffers that training changes.

    Large ones that never change (position tables, masks) would bloat every sidecar, so they are left out until their
    digest differs from what it was at the start. Tensor versions would be cheaper but tell lies here: BatchNorm's
    kernels write running statistics without counting a version.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._moving: set[str] = set()
        self._initial = self._large(named_buffers(model))

    def changed(self) -> dict[str, torch.Tensor]:
        """What a newcomer could not compute by running the script's set-up."""
        buffers = named_buffers(self._model)
        still = self._large(buffers)
        self._moving |= {name for name, digest in still.items() if self._initial.get(name) != digest}
        return {name: b for name, b in buffers.items() if b.nbytes <= SMALL or name in self._moving}

    def restore(self, values: dict[str, torch.Tensor]) -> None:
        buffers = named_buffers(self._model)
        with torch.no_grad():
            for name, value in values.items():
                buffers[name].copy_(value)

    def _large(self, buffers: dict[str, torch.Tensor]) -> dict[str, str]:
        """Digests of the large ones that are not known to move."""
        large = {n: b for n, b in buffers.items() if b.nbytes > SMALL and n not in self._moving}
        return dict(zip(large, _native.digests(list(large.values())), strict=True)) if large else {}


def named_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`dict(model.named_buffers())`, for use in every step: names are put together only where there are buffers, which
    makes it several times as fast. The tree is walked each time, because layers may be put in or replaced."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    # A module and its way from the root: (way of its parent, its name there).
    stack: list[tuple[torch.nn.Module, Any]] = [(model, None)]
    while stack:
        module, way = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[_joined(way, name)] = buffer
        children = module._modules
        if children:
            stack += [(child, (way, name)) for name, child in reversed(children.items()) if child is not None]
    return found


def _joined(way: Any, name: str) -> str:
    while way is not None:
        way, part = way
        name = f"{part}.{name}"
    return name

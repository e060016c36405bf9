"""Buffers of the model, which differ from rank to rank (BatchNorm's statistics) and so belong to the sidecar."""

from __future__ import annotations

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
        self._initial = dict(zip(*self._large(set()), strict=True))
        self._moving: set[str] = set()

    def changed(self) -> dict[str, torch.Tensor]:
        """What a newcomer could not compute by running the script's set-up."""
        names, digests = self._large(self._moving)
        self._moving |= {n for n, d in zip(names, digests, strict=True) if self._initial.get(n) != d}
        return {
            name: buffer
            for name, buffer in self._model.named_buffers()
            if buffer.nbytes <= SMALL or name in self._moving
        }

    def restore(self, values: dict[str, torch.Tensor]) -> None:
        buffers = dict(self._model.named_buffers())
        with torch.no_grad():
            for name, value in values.items():
                buffers[name].copy_(value)

    def _large(self, known: set[str]) -> tuple[list[str], list[str]]:
        large = {n: b for n, b in self._model.named_buffers() if b.nbytes > SMALL and n not in known}
        return list(large), _native.digests(list(large.values()))

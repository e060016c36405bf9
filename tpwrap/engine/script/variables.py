"""The script's variables: which of their tensors go with every step, which come from replicas, and which are lost."""

from __future__ import annotations

import sys

import torch

from tpwrap.engine.scalars import optimized
from tpwrap.engine.script import walk
from tpwrap.engine.script.boundary import Boundary
from tpwrap.engine.script.memory import Memory
from tpwrap.engine.script.passes import Passes
from tpwrap.engine.script.regions import Regions
from tpwrap.engine.script.slow import Slow
from tpwrap.engine.script.walk import Known, Loose

ROOM = 1 << 20
"""bytes of tensors in variables that are sent with every step"""


class Variables:
    """slow: tensors that are kept but not trained; large ones among the variables are put there."""

    def __init__(self, boundary: Boundary, regions: Regions, passes: Passes) -> None:
        self.slow = Slow()
        self.lost: dict[str, int] = {}
        """paths of tensors, as of the last publication, that a newcomer would lack: bytes"""
        self.unseen = ""
        """the path from which on the script's state is too large to be looked at, if so"""
        self._boundary = boundary
        self._regions = regions
        self._passes = passes
        self._looked = 0
        """passes begun when generators were looked for"""
        self._large: dict[str, int] = {}
        """paths of large tensors at the last publication: identity"""

    def now(self) -> Loose:
        """What variables hold, apart from what is known as a model or by an optimizer."""
        if self._looked != self._passes.count:
            self._looked = self._passes.count
            walk.find_generators()
        found = walk.loose(walk.user_frames(sys._getframe()), self.known())
        self.unseen = self.unseen or found.truncated or ""
        return found

    def known(self) -> Known:
        """What is restored as a model's or an optimizer's."""
        regions = self._regions
        known = {id(module) for model in regions.models for module in model.modules()}
        known.update(id(p) for optimizer in regions.optimizers for _, p in optimized(optimizer))
        return Known(known, regions.held)

    def sort_out(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Take large tensors out of `tensors`. Returns the paths of those that the script keeps; the others, which are
        new in each step, are lost."""
        untrained = self._hold_untrained()
        room, slow, lost, identities = ROOM, [], {}, {}
        for path in sorted(tensors, key=lambda path: tensors[path].nbytes):
            tensor = tensors[path]
            room -= tensor.nbytes
            if room >= 0:
                continue
            del tensors[path]
            identities[path] = id(tensor)
            if self._large.get(path, id(tensor)) == id(tensor):
                slow.append(path)
                self.slow.hold(path, {"": tensor})
            else:
                lost[path] = tensor.nbytes
        self._large = identities
        self.lost = lost
        self.slow.keep({*slow, *untrained})
        return slow

    def take(self, memory: Memory) -> list[torch.Tensor]:
        """A newcomer: give the variables the failed rank's values. Returns the tensors."""
        for path, size in memory.large.items():
            self._boundary.fail(f"{path} ({size / 1e6:.1f} MB) is read after backward() and too large to be sent")
        walk.find_generators()
        frames, known = walk.user_frames(sys._getframe()), self.known()
        changed = walk.inject(frames, memory.loose, memory.scalars, known, memory.aliases)
        elsewhere = {f"{path} (missing)" for path in memory.slow}
        missing = [path for path in changed if path.endswith(" (missing)") and path not in elsewhere]
        if missing:
            self._boundary.fail(f"{missing[0].removesuffix(' (missing)')} is not there in both")
        here = walk.loose(frames, known)
        if here.truncated:
            self._boundary.fail(f"the script's variables are too many to be looked at, from {here.truncated} on")
        for path in memory.slow:
            if path not in here.tensors:
                self._boundary.fail(f"{path} is not there")
            self.slow.hold(path, {"": here.tensors[path]})
        self.slow.keep({*memory.slow, *self._hold_untrained()})
        return [tensor for path, tensor in here.tensors.items() if path in memory.loose]

    def _hold_untrained(self) -> list[str]:
        """Models that no optimizer updates: an average of weights, a teacher."""
        regions = self._regions
        names = [f"model{i}" for i, model in enumerate(regions.models) if not regions.trained(model)]
        for name in names:
            self.slow.hold(name, dict(regions.models[int(name.removeprefix("model"))].named_parameters()))
        return names

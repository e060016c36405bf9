"""Tensors that no optimizer trains but that the script keeps, and may change: averaged weights, teachers, caches.

They are equal on all ranks (which is verified at a recovery, like everything that comes from replicas), and too large
to be sent with every step. A newcomer needs them as they were at the end of an update; the script changes them at other
moments, mostly right after it, and a survivor may have done that already. So those that move are copied at every
commit. Whether they move is seen by looking at a few elements; that a group did not move after all is verified when
it is served.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tpwrap.engine import _native
from tpwrap.engine.state import StateError

_LOOKED_AT = 4
"""tensors of a group, the largest ones, that are looked at in every commit"""
_ELEMENTS = 256
_ALL = 32
"""commits after which all tensors of a group are looked at"""


class Moved(StateError):
    """A group that was taken to stand still has changed since the commit that is asked for."""


class _Group:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.moves = False
        self.first = _digests(self.tensors)
        """digests when it was found"""
        self.copies: dict[int, dict[str, torch.Tensor]] = {}
        """by commit; only where it moves"""
        self._commits = 0
        names = sorted(self.tensors, key=lambda name: -self.tensors[name].nbytes)
        self._order = names
        self._seen = self._look(names)

    def commit(self, step: int) -> None:
        if not self.moves:
            self._commits += 1
            names = self._order if self._commits % _ALL == 0 else self._order[:_LOOKED_AT]
            self.moves = any(not torch.equal(self._seen[name], now) for name, now in self._look(names).items())
        if self.moves:
            self.copies[step] = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
            for old in sorted(self.copies)[:-3]:
                del self.copies[old]

    def at(self, step: int) -> dict[str, torch.Tensor]:
        if step in self.copies:
            return self.copies[step]
        if self.moves or _digests(self.tensors) != self.first:
            raise Moved(f"{next(iter(self.tensors))} was changed for the first time just now")
        return self.tensors

    def _look(self, names: list[str]) -> dict[str, torch.Tensor]:
        return {name: some(self.tensors[name]) for name in names}


class Slow:
    """All groups, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._dropped: dict[str, tuple[_Group, int]] = {}
        """for as long as a newcomer may ask for them: until the commit with that number"""
        self._step = 0

    def hold(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Know a group; the same tensor objects as before change nothing."""
        known = self._groups.get(name)
        if known is not None and [*map(id, known.tensors.values())] == [*map(id, tensors.values())]:
            return
        if tensors:
            self._groups[name] = _Group(tensors)

    def keep(self, names: set[str]) -> None:
        """Know no other groups any more."""
        for name in self._groups.keys() - names:
            self._dropped[name] = (self._groups.pop(name), self._step + 3)

    def commit(self, step: int) -> None:
        """An update was applied."""
        self._step = step
        for group in self._groups.values():
            group.commit(step)
        self._dropped = {name: held for name, held in self._dropped.items() if held[1] > step}

    def names(self) -> list[str]:
        return sorted(self._groups)

    def at(self, step: int, names: list[str]) -> dict[str, torch.Tensor]:
        """The tensors of these groups as they were at the end of update `step`. Raises Moved."""
        found = {}
        for name in names:
            group = self._groups.get(name) or self._dropped.get(name, (None, 0))[0]
            if group is None:
                raise Moved(f"{name} is not there any more")
            found.update({f"{name}:{key}": value for key, value in group.at(step).items()})
        return found

    def mine(self, names: list[str]) -> dict[str, torch.Tensor]:
        """The tensors themselves, to be written into."""
        return {f"{name}:{key}": value for name in names for key, value in self._groups[name].tensors.items()}


def _digests(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return list(_native.digests([tensor.detach() for tensor in tensors.values()]))


def some(tensor: torch.Tensor) -> torch.Tensor:
    """A few elements, as they are now."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)].clone()

"""torchdata's StatefulDataLoader: it is a DataLoader with an `__iter__` of its own, and makes an iterator to tell its
state if there is none (there is none on a newcomer's way, where nothing is saved either)."""

from __future__ import annotations

from typing import Any

from tpwrap.adapters.places import Places


def apply(places: Places, module: Any) -> None:
    places.passes.adopt(module.StatefulDataLoader)
    places.apart(module.StatefulDataLoader, "state_dict", dict)

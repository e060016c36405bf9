"""torchdata's StatefulDataLoader: it is a DataLoader with an `__iter__` of its own."""

from __future__ import annotations

from typing import Any

from tpwrap.adapters.places import Places


def apply(places: Places, module: Any) -> None:
    places.passes.adopt(module.StatefulDataLoader)

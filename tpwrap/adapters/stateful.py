"""torchdata's StatefulDataLoader: a DataLoader with an `__iter__` of its own, which tells where its iterator is.

On a newcomer's way it has none, and nothing is saved; afterwards the iterator must stand where it was when it is asked.
"""

from __future__ import annotations

import functools
from typing import Any

from tpwrap.adapters.places import Places


def apply(places: Places, module: Any) -> None:
    loader = module.StatefulDataLoader
    places.passes.adopt(loader)
    original = loader.state_dict

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if places.skipping:
            return {}
        if places.boundary.mode.name not in ("LIVE", "WINDOW"):
            return original(self)
        with places.boundary.aside():
            places.passes.ready(self)
            return original(self)

    loader.state_dict = state_dict

"""What this rank shares with its replicas, as digests: one of it all every so many updates, one by tensor if asked."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from tpwrap.control.messages import Digest, Tensors
from tpwrap.engine.state import combined

if TYPE_CHECKING:
    from tpwrap.engine.runtime import Runtime

_KEPT = 32
"""newest steps whose digests are kept: by the time they are asked for, training has gone on"""
SCALARS = "scalars (learning rates, counters, schedules)"


class Digests:
    """Of one worker."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._every = int(os.environ.get("TORCHPASS_CHECK_EVERY", "0"))
        self._kept: dict[int, dict[str, str]] = {}

    def after_update(self, step: int) -> None:
        """The update is applied. Runs in the training thread, inside the commit gate."""
        steps = self._runtime.steps
        if steps is None or self._every == 0 or step % self._every:
            return
        digests, scalars = steps.state_at(step).digests(), steps.scalars[step]
        self._runtime.send(Digest(step, self.keep(step, digests, scalars)))

    def keep(self, step: int, digests: dict[str, str], scalars: bytes) -> str:
        """Remember them, in case that somebody asks; returns the one of it all."""
        self._kept[step] = {**digests, SCALARS: hashlib.sha256(scalars).hexdigest()[:32]}
        for old in sorted(self._kept)[:-_KEPT]:
            del self._kept[old]
        return combined(digests, scalars)

    def explain(self, step: int) -> None:
        """Runs in the link thread."""
        self._runtime.send(Tensors(step, self._kept.get(step, {})))

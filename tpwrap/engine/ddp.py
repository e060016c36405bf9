"""What the engine must know of DistributedDataParallel: when it synchronizes, and how its buckets are laid out.

DDP builds its buckets twice: at construction, and once more at the first forward after the first synchronized backward,
in the order in which gradients became ready (with a broadcast of that order from rank 0). Another layout means other
roundings; another *size* makes gloo abort the receiver. So a newcomer must be in the same phase as the survivors, and
the layouts are compared before anyone goes on.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_instances: weakref.WeakSet[Any] = weakref.WeakSet()


def install() -> None:
    """Note every DDP instance that the script makes."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _instances.add(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def will_synchronize() -> bool:
    """Whether the backward pass about to start contributes to the update (False inside `no_sync`)."""
    instances = list(_instances)
    return not instances or any(instance.require_backward_grad_sync for instance in instances)


def finish_bucket_phase(step: int) -> None:
    """Rebuild buckets as the survivors have, offline, after the newcomer's one offline body.

    At step 1 the survivors' rebuild belongs to the forward that comes next: the newcomer does it there, live.
    """
    if step >= 2:
        for instance in list(_instances):
            instance.reducer._rebuild_buckets()


def layout(step: int) -> str:
    """A fingerprint of all bucket layouts; "" before they are final (step < 2) and without DDP.

    Call it where no backward pass is running: it takes the reducer's lock.
    """
    instances = sorted(_instances, key=id)
    if step < 2 or not instances:
        return ""
    parts = []
    for instance in instances:
        instance.logger.set_runtime_stats_and_log()
        data = instance._get_ddp_logging_data()
        parts.append((data.get("rebuilt_bucket_sizes"), data.get("rebuilt_per_bucket_param_indices")))
    return hashlib.sha256(repr(sorted(map(repr, parts))).encode()).hexdigest()[:16]

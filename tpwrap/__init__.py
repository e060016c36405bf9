"""TorchPass: self-healing PyTorch training.

import tpwrap
tp = tpwrap.session(model=model, optimizer=optimizer, scheduler=scheduler)
for batch in tp.batches(loader):
    ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpwrap.engine.session import session

__version__ = "0.1.0"
__all__ = ["__version__", "session"]


def __getattr__(name: str) -> Any:
    # The launcher imports this package too and must not pay for torch: what needs torch comes on first use.
    if name == "session":
        from tpwrap.engine.session import session

        return session
    raise AttributeError(f"module 'tpwrap' has no attribute {name!r}")

"""The commit gate: an optimizer step either happens wholly before a recovery looks at the rank, or wholly after it."""

from __future__ import annotations

import threading


class CommitGate:
    """Shut by a recovery (`shut` returns once no update is running), passed by every optimizer step."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._updating = threading.Lock()

    def __enter__(self) -> None:
        """Pass: wait until the gate is open, and keep it from being shut until the end of the `with`."""
        while True:
            self._open.wait()
            self._updating.acquire()
            if self._open.is_set():
                return
            self._updating.release()

    def __exit__(self, *_: object) -> None:
        self._updating.release()

    def close(self) -> None:
        """No new update starts; one that runs goes on. Does not wait."""
        self._open.clear()

    def settle(self) -> None:
        """Wait until no update runs (the gate must have been closed)."""
        with self._updating:
            pass

    def open(self) -> None:
        self._open.set()

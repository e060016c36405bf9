"""The ways in which an adapter changes a library: each is a method of `Places`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class _Boundary(Protocol):
    mode: Any
    begin: Any

    @property
    def outside(self) -> bool: ...

    def aside(self) -> AbstractContextManager[None]: ...

    def cross(self, kind: str, compute: Callable[[], Any], line: int | None = None) -> Any: ...


class _Regions(Protocol):
    through: int
    optimizers: list[Any]

    def found(self, module: Any) -> None: ...

    def for_real(self, module: Any) -> bool: ...

    def see_through(self, module: Any, through: bool) -> None: ...


class _Passes(Protocol):
    def adopt(self, loader: type) -> None: ...

    def ready(self, loader: Any) -> None: ...


class _Script(Protocol):
    boundary: Any
    regions: Any
    passes: Any
    outputs: Any


class Places:
    """What adapters may do, with the parts of the engine that they need."""

    def __init__(self, script: _Script) -> None:
        self.script = script
        self.boundary: _Boundary = script.boundary
        self.regions: _Regions = script.regions
        self.passes: _Passes = script.passes
        self.applied: list[str] = []
        """names of the libraries that were met"""

    @property
    def skipping(self) -> bool:
        """Whether the caller is a newcomer's script on its way to its entry."""
        return self.boundary.mode.name == "FORWARD" and self.boundary.outside

    @property
    def redoing(self) -> bool:
        """Whether the caller may be doing again what the failed rank has done after the entry."""
        return bool(self.script.outputs._redoing)

    def cross(self, compute: Callable[[], Any]) -> Any:
        """The value of `compute()`, recorded; on a newcomer's way the recorded one. It must be plain data."""
        return self.boundary.cross("a", compute, 0)

    def follow(self, file: str) -> None:
        """What code in this file asks of files and clocks is recorded, as if it were the script's own."""
        from tpwrap.engine.script import files

        files.follow(file)

    def holds_nothing(self, kind: type) -> None:
        """What objects of this class hold is made anew before it is used: a newcomer needs none of it."""
        from tpwrap.engine.script import walk

        walk.ignore(kind)

    def answered(self, owner: Any, *names: str) -> None:
        """What these functions return (plain data) is recorded; on a newcomer's way they do not run."""
        for name in names:
            original = getattr(owner, name, None)
            if original is not None:
                setattr(owner, name, self._answered(original))

    def answered_everywhere(self, module: Any, name: str) -> None:
        """The same for a function of a module, which others may have taken by name."""
        if hasattr(module, name):
            self._everywhere(module, name, self._answered)

    def skipped(self, owner: Any, *names: str) -> None:
        """These functions write and return nothing: on a newcomer's way they do not run."""
        for name in names:
            original = getattr(owner, name, None)
            if original is not None:
                setattr(owner, name, self._skipped(original))

    def skipped_everywhere(self, module: Any, name: str) -> None:
        if hasattr(module, name):
            self._everywhere(module, name, self._skipped)

    def _answered(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if not self.boundary.outside:
                return original(*args, **kwargs)
            return self.cross(lambda: original(*args, **kwargs))

        return function

    def _skipped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            return None if self.skipping else original(*args, **kwargs)

        return function

    def _everywhere(self, module: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(module, name)
        replacement = wrap(original)
        for other in list(sys.modules.values()):
            if getattr(other, "__dict__", {}).get(name) is original:
                setattr(other, name, replacement)

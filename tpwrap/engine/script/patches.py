"""Functions that are replaced everywhere: where they are defined, and wherever a module has taken them by name."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

_LEFT_ALONE = ("posix", "_io", "tpwrap", "importlib", "_frozen_importlib", "_frozen_importlib_external")
"""what Python itself and we need as it is"""


class Patches:
    """All that was replaced, to be put back together."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._awaited: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._finder: _Finder | None = None

    def everywhere(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Replace each original by its replacement in all modules imported so far. (A warm process has imported the
        script's own modules, and `from shutil import copyfile` has taken place there.)"""
        replacements = {id(original): (original, replacement) for original, replacement in pairs}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in _LEFT_ALONE:
                continue
            names = getattr(module, "__dict__", {})
            if replacements.keys().isdisjoint(map(id, list(names.values()))):
                continue
            for key, value in list(names.items()):
                if id(value) in replacements:
                    self.put(module, key, replacements[id(value)][1])

    def put(self, owner: Any, name: str, value: Any) -> None:
        """owner.name = value."""
        before = owner.__dict__[name]
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def when_imported(self, name: str, then: Callable[[ModuleType], None]) -> None:
        """Call `then(module)` now, or once the module is imported."""
        module = sys.modules.get(name)
        if module is not None:
            then(module)
            return
        self._awaited.setdefault(name, []).append(then)
        if self._finder is None:
            self._finder = _Finder(self._awaited)
            sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        if self._finder is not None:
            sys.meta_path.remove(self._finder)
            self._finder = None
        self._awaited.clear()
        while self._undo:
            self._undo.pop()()


class _Finder(importlib.abc.MetaPathFinder):
    """Has the other finders find, and speaks up after the module was executed."""

    def __init__(self, awaited: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._awaited = awaited

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._awaited:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._announce(fullname, spec.loader)
                return spec
        return None

    def _announce(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for then in self._awaited.pop(name, []):
                then(module)

        loader.exec_module = exec_module

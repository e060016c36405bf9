"""Where values come out of tensors, other ranks, files and clocks into the script's Python: each is recorded there.

`install` puts these places under observation once, before the script starts.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import gc
import glob
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_c10d

from tpwrap.engine.script.boundary import Boundary, Mode, where
from tpwrap.engine.script.files import is_script_file

_VALUES = (
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__",
    "__contains__", "__repr__", "equal", "allclose", "is_nonzero",
)  # fmt: skip
_FILES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os.path, ("exists", "isfile", "isdir", "lexists", "getsize", "getmtime")),
    (os, ("listdir",)),
    (glob, ("glob",)),
    (pathlib.Path, ("exists", "is_file", "is_dir", "glob", "rglob", "iterdir")),
)
_ITERATED = ("rglob", "iterdir")
"""they return iterators (and so does Path.glob)"""
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
           "strftime", "ctime", "asctime", "localtime", "gmtime")  # fmt: skip


def install(boundary: Boundary, written: Callable[[str], None]) -> None:
    """Observe the places where values come out. written: told of places where the script writes by descriptors."""
    _tensors(boundary)
    _reductions(boundary)
    _objects(boundary)
    _surroundings(boundary)
    _descriptors(boundary, written)


def _in_memory_of(own: Any, value: np.ndarray[Any, Any]) -> Any:
    """A recorded array in the place of a newcomer's own, which may share its memory with a tensor."""
    if own.shape != value.shape or own.dtype != value.dtype or not own.flags.writeable:
        return value
    own[...] = value
    return own


def _is_engines(frame: FrameType) -> bool:
    """Whether this is our own code, which serves recoveries in the script's thread."""
    return str(frame.f_globals.get("__name__")).startswith("tpwrap.")


def _tensors(boundary: Boundary) -> None:
    def observed(original: Any) -> Any:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if boundary.inside or not boundary.outside or _is_engines(caller):
                return original(*args, **kwargs)
            value = boundary.cross("v", lambda: original(*args, **kwargs), caller.f_lineno, args)
            if boundary.mode is not Mode.LIVE and isinstance(value, np.ndarray) and value.ndim:
                with boundary.aside():
                    return _in_memory_of(original(*args, **kwargs), value)
            return value

        return method

    for name in _VALUES:
        original = getattr(torch.Tensor, name, None)
        if original is not None:
            setattr(torch.Tensor, name, observed(original))
    for name in ("equal", "allclose", "is_nonzero", "seed", "initial_seed"):
        setattr(torch, name, observed(getattr(torch, name)))


def _reductions(boundary: Boundary) -> None:
    """Collectives on tensors of the script: in the window, what they leave in their first argument is equal on all
    ranks, or (of the others) is lost; a newcomer's own collectives leave nothing true."""

    def observed(original: Any, equal: bool) -> Any:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if boundary.mode is Mode.WINDOW and boundary.outside:
                boundary.reduced(args[0] if args else next(iter(kwargs.values())), equal)
            return result

        return collective

    for equal, names in ((True, _EQUAL), (False, _UNEQUAL)):
        for name in names:
            original = getattr(torch_c10d, name, None)
            if original is not None:
                wrapped = observed(original, equal)
                setattr(torch_c10d, name, wrapped)
                setattr(dist, name, wrapped)


_EQUAL = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast")
_UNEQUAL = ("reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter", "all_to_all",
            "all_to_all_single", "recv")  # fmt: skip


def _objects(boundary: Boundary) -> None:
    """Collectives that bring Python objects of other ranks. In set-up they are answered from its own record."""

    def observed(name: str, original: Any, filled: str) -> Any:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if not boundary.outside:
                return original(*args, **kwargs)
            if boundary.begin is not None:
                boundary.inside += 1  # what torch, or the set-up's record, reads from tensors in it is not the script's
                try:
                    return original(*args, **kwargs)
                finally:
                    boundary.inside -= 1
            into = kwargs.get(filled, args[_POSITION[name]] if len(args) > _POSITION[name] else None)

            def run() -> Any:
                original(*args, **kwargs)
                return None if into is None else list(into)

            found = boundary.cross("o", run, sys._getframe(1).f_lineno)
            if into is not None and found is not None and boundary.mode is not Mode.LIVE:
                into[:] = found
            return None

        return collective

    for name, filled in _FILLED.items():
        wrapped = observed(name, getattr(torch_c10d, name), filled)
        setattr(torch_c10d, name, wrapped)
        setattr(dist, name, wrapped)


_FILLED = {
    "all_gather_object": "object_list",
    "gather_object": "object_gather_list",
    "broadcast_object_list": "object_list",
    "scatter_object_list": "scatter_object_output_list",
    "recv_object_list": "object_list",
}
_POSITION = {
    "all_gather_object": 0,
    "gather_object": 1,
    "broadcast_object_list": 0,
    "scatter_object_list": 0,
    "recv_object_list": 0,
}


def _surroundings(boundary: Boundary) -> None:
    """Files, clocks, identifiers: only where the script itself asks. Libraries ask at their import, too, which happens
    at other moments in a newcomer."""

    def observed(kind: str, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if not boundary.outside:
                return original(*args, **kwargs)
            frame = sys._getframe(1)
            if frame.f_code is _Unbound.__call__.__code__ and frame.f_back is not None:
                frame = frame.f_back
            if not is_script_file(frame.f_code.co_filename):
                return original(*args, **kwargs)
            values: list[Any] = []

            def compute() -> Any:
                values.append(original(*args, **kwargs))
                if isinstance(values[0], Iterator):
                    values[0] = [*values[0]]
                return _to_plain(values[0])

            plain = boundary.cross(kind, compute, frame.f_lineno)
            value = values[0] if values else _from_plain(plain)
            return iter(value) if name_of(original) in _ITERATED or original is _PATH_GLOB else value

        return function

    for owner, names in _FILES:
        for name in names:
            made = observed("f", getattr(owner, name))
            setattr(owner, name, made if owner is pathlib.Path else _Unbound(made))
    for name in _CLOCKS:
        setattr(time, name, _Unbound(observed("t", getattr(time, name))))
    for name in ("uuid1", "uuid4"):
        setattr(uuid, name, observed("u", getattr(uuid, name)))
    os.urandom = _Unbound(observed("u", os.urandom))
    for kind, names in ((datetime.datetime, ("now", "utcnow", "today")), (datetime.date, ("today",))):
        for name in names:
            if name in kind.__dict__:
                _replace_class_method(kind, name, functools.partial(observed, "t"))


def name_of(function: Any) -> str:
    return str(getattr(function, "__name__", ""))


_PATH_GLOB = pathlib.Path.glob


class _Unbound:
    """A function that does not become a method where a class has it as an attribute (`converter = time.gmtime`): the
    functions made in C that these stand for do not either."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _replace_class_method(kind: type, name: str, observed: Callable[[Callable[..., Any]], Any]) -> None:
    """Set a class method of a type written in C, whose attributes cannot be assigned: in the dictionary behind it. (A
    subclass in its place would break type annotations and everybody's isinstance.)"""
    (attributes,) = (one for one in gc.get_referents(kind.__dict__) if isinstance(one, dict))
    original = attributes[name]

    def method(cls: type, *args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, cls)(*args, **kwargs)

    attributes[name] = classmethod(observed(functools.wraps(original)(method)))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def _descriptors(boundary: Boundary, written: Callable[[str], None]) -> None:
    original = os.open

    @functools.wraps(original)
    def open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        frame = sys._getframe(1)
        if flags & (os.O_WRONLY | os.O_RDWR) and boundary.outside and is_script_file(frame.f_code.co_filename):
            if boundary.mode is Mode.LIVE:
                written(where(frame))
            else:
                boundary.fail(f"{where(frame)} opens a file for writing by os.open")
        return original(path, flags, *args, **kwargs)

    os.open = open


def _to_plain(value: Any) -> Any:
    """What the tape can hold."""
    if isinstance(value, time.struct_time):
        return ("struct_time", list(value))
    if isinstance(value, datetime.datetime):
        return ("datetime", value.isoformat())
    if isinstance(value, datetime.date):
        return ("date", value.isoformat())
    if isinstance(value, uuid.UUID):
        return ("uuid", str(value))
    if isinstance(value, list) and value and isinstance(value[0], pathlib.PurePath):
        return ("paths", [str(path) for path in value])
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2:
        kind, content = value
        if kind == "struct_time":
            return time.struct_time(content)
        if kind == "datetime":
            return datetime.datetime.fromisoformat(content)
        if kind == "date":
            return datetime.date.fromisoformat(content)
        if kind == "uuid":
            return uuid.UUID(content)
        if kind == "paths":
            return [pathlib.Path(path) for path in content]
    return value

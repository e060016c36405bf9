"""The tensors and scalars that a script's own state holds: found by path in one process, put in place in another.

Roots are the live local names of the user's frames and the globals of the user's modules. Two processes that execute
the same code find the same paths, such as `train.py:main/running` or `train.py:<module>/trainer.meters['loss'].sum`.
The walk is breadth first, so a tensor that is reachable in several ways gets its shortest path; the others are aliases.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import enum
import functools
import gc
import logging
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import tpwrap
from tpwrap.engine.script.files import is_followed
from tpwrap.engine.script.liveness import live_names
from tpwrap.engine.script.passes import Pass

NODE_LIMIT = 20_000
_ALIASED = 4096
"""bytes; only such tensors are looked up by the memory that they lie in"""

Scalar = int | float | bool | str | None
_LONGEST_TEXT = 1024
"""characters; longer texts (a corpus) are not sent with every step"""
_SCALARS = frozenset({int, float, bool, str, type(None)})


@dataclass
class Loose:
    """What the script's state holds besides what the engine knows of."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """further paths of a tensor, to its path in `tensors`"""
    scalars: dict[str, Scalar] = field(default_factory=dict)
    """live locals, and the values one level below them"""
    truncated: str | None = None
    """the path at which the limit was reached: from there on nothing was looked at"""


class Known:
    """What the engine restores by itself. ids: of tensors and Modules. held: the tensors; only asked for where one of
    the script's tensors may lie in the same memory."""

    def __init__(self, ids: set[int], held: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._ids = ids
        self._held = held
        self._memory: set[int] | None = None

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, int) or key >= 0:
            return key in self._ids
        if self._memory is None:
            self._memory = {memory_of(tensor) for tensor in self._held()}
        return key in self._memory


def memory_of(tensor: torch.Tensor) -> int:
    """A name, among ids of objects, for the memory that a tensor lies in."""
    try:
        return -tensor.untyped_storage().data_ptr() or -1
    except (NotImplementedError, RuntimeError):  # sparse and fake tensors have none
        return -1


def user_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of the user's code on the stack that ends in `frame`, outermost first."""
    found = []
    while frame is not None:
        if _is_users(frame.f_code.co_filename, frame.f_globals):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def loose(frames: list[FrameType], known: Container[int], limit: int = NODE_LIMIT) -> Loose:
    """What the live state of `frames` and of the user's modules reaches.

    `known` holds the ids of tensors that the engine restores by itself, and the `memory_of` them. The id of a Module in
    it says that all its own parameters and buffers (not those of its children) are known, which is quicker. `limit`
    counts containers and what lies in them.
    """
    return _Walk(known, limit).run(frames).found


def inject(
    frames: list[FrameType],
    values: dict[str, torch.Tensor],
    scalars: dict[str, Scalar],
    known: Container[int] = (),
    aliases: dict[str, str] | None = None,
    limit: int = NODE_LIMIT,
) -> list[str]:
    """Gives this process the state that `loose` found in another one, at the same place of the same code.

    Tensors keep their identity where shape and type agree. Returns the paths that had another value, sorted; those
    that could not be set, or exist on one side only, end in ` (missing)`.
    """
    walk = _Walk(known, limit).run(frames)
    here, places = walk.found, walk.places
    changed: set[str] = set()
    missing: set[str] = set()
    written: dict[int, str] = {}
    targets: dict[str, torch.Tensor] = {}
    for path, value in values.items():
        target = here.tensors.get(path)
        if target is None and path in here.aliases:
            target = here.tensors[here.aliases[path]]
        if target is not None and _same(target, value):
            written.setdefault(id(target), path)
            targets[path] = target
            continue
        changed.add(path)
        if target is not None and id(target) not in written and _copied(target, value):
            written[id(target)] = path
            targets[path] = target
        elif not _replaced(places.get(path), target, value, targets, path):
            missing.add(path)
    # One of two that share memory here, and did not there, was overwritten by the other.
    for path, target in list(targets.items()):
        if not _same(target, values[path]):
            changed.add(path)
            if not _replaced(places.get(path), target, values[path], targets, path):
                missing.add(path)
    aliases = aliases or {}
    for path, first in aliases.items():
        place = places.get(path)
        if first not in targets or place is None:
            missing.add(path)
        elif place.get() is not targets[first]:
            changed.add(path)
            if not place.set(targets[first]):
                missing.add(path)
    expected = values.keys() | aliases.keys()
    missing.update(path for path in (*here.tensors, *here.aliases) if path not in expected)

    for path, scalar in scalars.items():
        if path not in here.scalars:
            missing.add(path)
        elif not _same_scalar(here.scalars[path], scalar):
            changed.add(path)
            if not places[path].set(scalar):
                missing.add(path)
    missing.update(here.scalars.keys() - scalars.keys())
    return sorted((changed - missing) | {f"{path} (missing)" for path in missing})


def _same_scalar(a: Scalar, b: Scalar) -> bool:
    return type(a) is type(b) and (a == b or repr(a) == repr(b)) and repr(a) == repr(b)  # -0.0, NaN


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, type and every bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    with torch.no_grad():
        a, b = a.detach(), b.detach().to(a.device)
        if a.layout != torch.strided or a.is_quantized:
            return False
        return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _copied(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `target` could take the value in place."""
    if target.shape != value.shape or target.dtype != value.dtype:
        return False
    try:
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            target.data.copy_(value)  # not counted as a change: graphs that saved the tensor stay valid
    except RuntimeError:  # elements of an expanded tensor share memory
        return False
    return True


def _replaced(
    place: _Place | None, old: torch.Tensor | None, value: torch.Tensor, targets: dict[str, torch.Tensor], path: str
) -> bool:
    if place is None:
        return False
    new = value.detach().clone()
    if old is not None:
        new = new.to(old.device)
        new.requires_grad_(old.requires_grad and new.is_floating_point())
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    targets[path] = new
    return place.set(new)


# ---- places


class _By(enum.Enum):
    """How a value is reached from its owner."""

    ROOT = enum.auto()
    GLOBAL = enum.auto()
    LOCAL = enum.auto()
    ATTRIBUTE = enum.auto()
    ITEM = enum.auto()
    NTH_VALUE = enum.auto()
    """of a dict, whose key has no stable text"""
    CELL = enum.auto()
    REFERENT = enum.auto()
    """what an iterator goes through"""
    MEMBER = enum.auto()
    """of a Module, in the dict that the key names first"""


class _Place:
    """Where a value lies: read from its root each time, because tuples on the way may have been rebuilt."""

    __slots__ = ("by", "key", "owner")

    def __init__(self, owner: _Place | None, by: _By, key: Any) -> None:
        self.owner = owner
        self.by = by
        self.key = key

    def path(self) -> str:
        parts = []
        place: _Place | None = self
        while place is not None:
            parts.append(place.text())
            place = place.owner
        return "".join(reversed(parts))

    def text(self) -> str:
        if self.by is _By.ROOT:
            return str(self.key[0])
        if self.by is _By.ITEM:
            return f"[{self.key!r}]"
        if self.by is _By.NTH_VALUE:
            return f"[#{self.key}]"
        if self.by is _By.CELL:
            return f".<closure {self.key}>"
        if self.by is _By.REFERENT:
            return f".<rest {self.key}>"
        if self.by is _By.MEMBER:
            return f".{self.key[1]}"
        return f".{self.key}" if self.by is _By.ATTRIBUTE else f"/{self.key}"

    def get(self) -> Any:
        key = self.key
        if self.by is _By.ROOT:
            return key[1]
        assert self.owner is not None
        owner = self.owner.get()
        if self.by is _By.GLOBAL or self.by is _By.ITEM:
            return owner[key]
        if self.by is _By.LOCAL:
            return owner.f_locals[key]
        if self.by is _By.ATTRIBUTE:
            return getattr(owner, key)
        if self.by is _By.NTH_VALUE:
            return list(owner.values())[key]
        if self.by is _By.CELL:
            return owner.__closure__[key].cell_contents
        if self.by is _By.REFERENT:
            return gc.get_referents(owner)[key]
        return owner.__dict__[key[0]][key[1]]

    def set(self, value: Any) -> bool:
        """False where nothing can be put."""
        key = self.key
        if self.owner is None or self.by is _By.REFERENT:
            return False
        owner = self.owner.get()
        try:
            if self.by is _By.LOCAL:
                _set_local(owner, key, value)
            elif self.by is _By.ATTRIBUTE:
                if key in getattr(owner, "__dict__", ()):
                    owner.__dict__[key] = value  # past a frozen dataclass and a Module's own rules
                elif isinstance(owner, types.FunctionType):
                    setattr(owner, key, value)
                else:
                    object.__setattr__(owner, key, value)
            elif self.by is _By.NTH_VALUE:
                owner[list(owner)[key]] = value
            elif self.by is _By.CELL:
                owner.__closure__[key].cell_contents = value
            elif self.by is _By.MEMBER:
                owner.__dict__[key[0]][key[1]] = value
            elif isinstance(owner, tuple):
                items = [*owner[:key], value, *owner[key + 1 :]]
                return self.owner.set(tuple.__new__(type(owner), items))
            else:
                owner[key] = value
        except (AttributeError, TypeError):
            return False
        return True


def _set_local(frame: FrameType, name: str, value: Any) -> None:
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


# ---- whose code


_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        *(os.path.dirname(package.__file__ or "") for package in (torch, tpwrap)),
    }
)


@functools.cache
def _is_users_file(file: str) -> bool:
    if is_followed(file):
        return True
    # By the name as it is first: to resolve the links of all modules' files takes a tenth of a second.
    return not (_is_library(file) or _is_library(os.path.realpath(file)))


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or "/site-packages/" in path or "/dist-packages/" in path


def _is_users(file: str, names: dict[str, Any]) -> bool:
    if file.startswith("<"):  # given by -c, or made by the standard library
        return file in ("<string>", "<stdin>") and names.get("__name__") == "__main__"
    return _is_users_file(file)


_modules_seen: tuple[int, str] = (0, "")
_user_modules: list[types.ModuleType] = []


def _modules() -> list[types.ModuleType]:
    """The user's modules, by name."""
    global _modules_seen, _user_modules
    now = len(sys.modules), next(reversed(sys.modules))
    if now != _modules_seen:
        _user_modules = []
        for name, module in sorted(sys.modules.items()):
            file = getattr(module, "__file__", None)
            users = file and _is_users_file(file) and not is_followed(file)
            if isinstance(module, types.ModuleType) and (name == "__main__" or users):
                _user_modules.append(module)
        _modules_seen = now
    return _user_modules


# ---- generators


_suspended: list[weakref.ref[types.GeneratorType[Any, Any, Any]]] = []


def find_generators() -> None:
    """Look for suspended generators of the user's code that go through a loader. One that only a running `for` goes
    through is in no variable. Takes milliseconds: call it when a pass has begun, and not at every step."""
    found = []
    for one in gc.get_objects():
        if type(one) is types.GeneratorType and _frame_of(one) is not None:
            passes = _passes_behind(one)
            if passes:
                found.append((passes, one))
    _suspended[:] = [weakref.ref(one) for _, one in sorted(found, key=lambda entry: entry[0])]


def _frame_of(generator: types.GeneratorType[Any, Any, Any] | None) -> FrameType | None:
    """The frame of a generator of the user's code that is suspended, and not on the stack, or over."""
    frame = None if generator is None or generator.gi_running else generator.gi_frame
    return frame if frame is not None and _is_users(frame.f_code.co_filename, frame.f_globals) else None


def _passes_behind(generator: types.GeneratorType[Any, Any, Any]) -> list[int]:
    """How far the passes over loaders are that a generator goes through, and their numbers: generators in this order
    come in the same order in every process."""
    numbers: list[int] = []
    seen: set[int] = set()
    behind: list[tuple[int, Any]] = [(0, generator)]
    for depth, one in behind:
        for held in gc.get_referents(one):
            if type(held) is Pass:
                numbers += [depth, held.number]
            elif isinstance(held, (types.GeneratorType, *_ITERATORS)) and id(held) not in seen and depth < 8:
                seen.add(id(held))
                behind.append((depth + 1, held))
    return numbers


# ---- kinds


class _Kind(enum.IntEnum):
    """What is done with a value, by its class."""

    ATOM = 1
    """nothing: it holds no tensor, or the engine handles it elsewhere"""
    TENSOR = 2
    SEQUENCE = 3
    MAPPING = 4
    OBJECT = 5
    MODULE = 6
    FUNCTION = 7
    METHOD = 8
    PARTIAL = 9
    GENERATOR = 10
    ITERATOR = 11


_ITERATORS: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter({}.values())),
    type(iter({}.items())),
    type(iter(collections.deque())),
    type(reversed([])),
    enumerate,
    zip,
    map,
    filter,
    reversed,
)
_OPAQUE: tuple[type, ...] = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    DataLoader,
    Sampler,
    Dataset,
    types.ModuleType,
    type,
    enum.Enum,
    logging.Logger,
)
_PLAIN = (types.SimpleNamespace, argparse.Namespace)
_kinds: dict[type, _Kind] = {}


def ignore(kind: type) -> None:
    """What objects of this class hold is not looked at."""
    _kinds[kind] = _Kind.ATOM


def _kind(cls: type) -> _Kind:
    kind = _kinds.get(cls)
    if kind is None:
        kind = _kinds[cls] = _classified(cls)
    return kind


def _classified(cls: type) -> _Kind:
    if issubclass(cls, torch.Tensor):
        return _Kind.TENSOR
    if cls in _SCALARS or issubclass(cls, _OPAQUE):
        return _Kind.ATOM
    kinds: tuple[tuple[_Kind, tuple[type, ...]], ...] = (
        (_Kind.MODULE, (nn.Module,)),
        (_Kind.SEQUENCE, (list, tuple, collections.deque)),
        (_Kind.MAPPING, (dict,)),
        (_Kind.FUNCTION, (types.FunctionType,)),
        (_Kind.METHOD, (types.MethodType,)),
        (_Kind.PARTIAL, (functools.partial,)),
        (_Kind.GENERATOR, (types.GeneratorType,)),
        (_Kind.ITERATOR, _ITERATORS),
        (_Kind.OBJECT, _PLAIN),
    )
    for kind, classes in kinds:
        if issubclass(cls, classes):
            return kind
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if cls.__module__ != "__main__" and (file is None or os.path.realpath(file).startswith(_LIBRARIES)):
        in_packages = file is not None and ("/site-packages/" in file or "/dist-packages/" in file)
        if not in_packages or cls.__module__.partition(".")[0] in ("torch", "tpwrap"):
            return _Kind.ATOM
    return _Kind.OBJECT if cls.__dictoffset__ or _slots(cls) else _Kind.ATOM


_slots_known: dict[type, tuple[str, ...]] = {}


def _slots(cls: type) -> tuple[str, ...]:
    slots = _slots_known.get(cls)
    if slots is None:
        slots = _slots_known[cls] = tuple(
            name
            for base in cls.__mro__
            for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType) and base.__module__ != "builtins"
        )
    return slots


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _is_torchs(cls: type) -> bool:
    """A Module of this class has no attributes of the user's."""
    return cls.__module__.startswith("torch.")


# ---- the walk


class _Walk:
    def __init__(self, known: Container[int], limit: int) -> None:
        self.found = Loose()
        self.places: dict[str, _Place] = {}
        self.known = known
        self.left = limit
        self.seen: set[int] = set()
        self.first: dict[int, str] = {}
        """path by tensor"""
        self.queue: list[tuple[Any, _Kind, _Place]] = []
        self.kept: list[Any] = []
        """so that no id is used twice"""

    def run(self, frames: list[FrameType]) -> _Walk:
        visitors = self._VISITORS
        for place, by, values in _roots(frames, self.kept):
            self._offer(values.items(), place, by, True)
        roots = len(self.queue)
        for index, (value, kind, place) in enumerate(self.queue):  # grows on the way
            if self.left < 0:
                self.found.truncated = place.path()
                break
            visitors[kind](self, value, place, index < roots)
        return self

    def _offer(self, items: Iterable[tuple[Any, Any]], owner: _Place, by: _By, scalars: bool = False) -> None:
        """Takes in what lies in `owner`."""
        kinds, seen = _kinds, self.seen
        prefix = owner.path() if scalars else ""
        count = 0
        for key, value in items:
            count += 1
            cls = type(value)
            kind = kinds.get(cls) or _kind(cls)
            if kind is _ATOM:
                if scalars and cls in _SCALARS and (cls is not str or len(value) <= _LONGEST_TEXT):
                    place = _Place(owner, by, key)
                    path = prefix + place.text()
                    self.found.scalars[path] = value
                    self.places[path] = place
            elif kind is _TENSOR:
                self._tensor(value, _Place(owner, by, key))
            elif id(value) not in seen:
                seen.add(id(value))
                self.queue.append((value, kind, _Place(owner, by, key)))
        self.left -= count

    def _tensor(self, tensor: torch.Tensor, place: _Place) -> None:
        if id(tensor) in self.known or (tensor.nbytes >= _ALIASED and memory_of(tensor) in self.known):
            return
        path = place.path()
        self.places[path] = place
        first = self.first.setdefault(id(tensor), path)
        if first != path:
            self.found.aliases[path] = first
            return
        self.found.tensors[path] = tensor
        if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
            self._tensor(tensor.grad, _Place(place, _By.ATTRIBUTE, "grad"))

    def _sequence(self, value: Any, place: _Place, near_root: bool) -> None:
        self.left -= 1
        if any(map(gc.is_tracked, value)):  # numbers and strings are not, tensors are
            self._offer(enumerate(value), place, _By.ITEM)
        if type(value) not in _BUILT_IN:
            self._attributes(value, place, near_root)

    def _mapping(self, value: dict[Any, Any], place: _Place, near_root: bool) -> None:
        self.left -= 1
        if near_root or gc.is_tracked(value):  # the interpreter does not track a dict that holds only atoms
            if all(map(_STABLE.__contains__, map(type, value))):
                self._offer(value.items(), place, _By.ITEM, near_root)
            else:
                self._offer(enumerate(value.values()), place, _By.NTH_VALUE, near_root)
        if type(value) not in _BUILT_IN:
            self._attributes(value, place, near_root)

    def _object(self, value: Any, place: _Place, near_root: bool) -> None:
        self.left -= 1
        self._attributes(value, place, near_root)

    def _attributes(self, value: Any, place: _Place, near_root: bool) -> None:
        attributes = getattr(value, "__dict__", None)
        if attributes:
            self._offer(attributes.items(), place, _By.ATTRIBUTE, near_root)
        slots = _slots(type(value))
        if slots:
            held = ((name, getattr(value, name)) for name in slots if hasattr(value, name))
            self._offer(held, place, _By.ATTRIBUTE, near_root)

    def _module(self, value: nn.Module, place: _Place, near_root: bool) -> None:
        self.left -= 1
        attributes = value.__dict__
        if id(value) not in self.known:
            for members in ("_parameters", "_buffers"):
                held = attributes[members]
                if held:
                    self._offer((((members, name), held[name]) for name in held), place, _By.MEMBER)
        children = attributes["_modules"]
        if children:
            known = self.known
            unknown = [
                (("_modules", name), child)
                for name, child in children.items()
                if id(child) not in known or not _is_torchs(type(child)) or child.__dict__["_modules"]
            ]
            self._offer(unknown, place, _By.MEMBER)
        if not _is_torchs(type(value)) and len(attributes) > len(_MODULE_ATTRIBUTES):
            others = [item for item in attributes.items() if item[0] not in _MODULE_ATTRIBUTES]
            self._offer(others, place, _By.ATTRIBUTE, near_root)

    def _function(self, value: types.FunctionType, place: _Place, near_root: bool) -> None:
        self.left -= 1
        if not _is_users(value.__code__.co_filename, value.__globals__):
            return
        if value.__closure__:
            self._offer(_cells(value.__closure__), place, _By.CELL)
        for name in ("__defaults__", "__kwdefaults__"):
            held = getattr(value, name)
            if held:
                self._offer([(name, held)], place, _By.ATTRIBUTE)
        if value.__dict__:
            self._offer(value.__dict__.items(), place, _By.ATTRIBUTE)

    def _method(self, value: types.MethodType, place: _Place, near_root: bool) -> None:
        self.left -= 1
        self._offer([("__self__", value.__self__)], place, _By.ATTRIBUTE)

    def _partial(self, value: functools.partial[Any], place: _Place, near_root: bool) -> None:
        self.left -= 1
        held = [(name, getattr(value, name)) for name in ("func", "args", "keywords")]
        self.kept.append(held)
        self._offer(held, place, _By.ATTRIBUTE)

    def _generator(self, value: types.GeneratorType[Any, Any, Any], place: _Place, near_root: bool) -> None:
        self.left -= 1
        frame = value.gi_frame
        if frame is None or value.gi_running or not _is_users(frame.f_code.co_filename, frame.f_globals):
            return  # over, or on the stack
        inside = _Place(place, _By.ATTRIBUTE, "gi_frame")
        names = live_names(frame)
        values = frame.f_locals
        self.kept.append(frame)
        self._offer(((name, values[name]) for name in sorted(names) if name in values), inside, _By.LOCAL)

    def _iterator(self, value: Any, place: _Place, near_root: bool) -> None:
        self.left -= 1
        self._offer(enumerate(gc.get_referents(value)), place, _By.REFERENT)

    _VISITORS = {  # noqa: RUF012
        _Kind.SEQUENCE: _sequence,
        _Kind.MAPPING: _mapping,
        _Kind.OBJECT: _object,
        _Kind.MODULE: _module,
        _Kind.FUNCTION: _function,
        _Kind.METHOD: _method,
        _Kind.PARTIAL: _partial,
        _Kind.GENERATOR: _generator,
        _Kind.ITERATOR: _iterator,
    }


_ATOM, _TENSOR = _Kind.ATOM, _Kind.TENSOR
_STABLE = frozenset({str, int, float, bool, type(None), bytes})
"""keys whose text is the same in every process"""
_BUILT_IN = frozenset({list, tuple, dict, collections.deque, collections.OrderedDict, collections.defaultdict})


def _cells(closure: tuple[types.CellType, ...]) -> Iterator[tuple[int, Any]]:
    for number, cell in enumerate(closure):
        try:
            yield number, cell.cell_contents
        except ValueError:  # not set yet
            continue


def _roots(frames: list[FrameType], kept: list[Any]) -> Iterator[tuple[_Place, _By, dict[str, Any]]]:
    labels: collections.Counter[str] = collections.Counter()

    def root(file: str, function: str, owner: Any) -> _Place:
        label = f"{os.path.basename(file)}:{function}"
        labels[label] += 1
        return _Place(None, _By.ROOT, (label if labels[label] == 1 else f"{label}#{labels[label]}", owner))

    running: dict[int, FrameType] = {}
    for frame in frames:
        code, values = frame.f_code, frame.f_locals
        if values is frame.f_globals:
            running[id(values)] = frame
            continue
        names = live_names(frame)
        kept.append(values)
        by = _By.LOCAL
        yield root(code.co_filename, code.co_name, frame), by, {n: values[n] for n in sorted(names) if n in values}

    for reference in _suspended:
        suspended = _frame_of(reference())
        if suspended is not None:
            code, values = suspended.f_code, suspended.f_locals
            names = live_names(suspended)
            kept.append(values)
            owner = root(code.co_filename, f"{code.co_name}()", suspended)
            yield owner, _By.LOCAL, {n: values[n] for n in sorted(names) if n in values}

    namespaces = {id(module.__dict__): module.__dict__ for module in _modules()}
    namespaces.update((id(frame.f_globals), frame.f_globals) for frame in frames)
    for number, namespace in namespaces.items():
        top = running.get(number)
        # Other modules may read what they import; nobody imports the script itself.
        live: Container[str] = live_names(top) if top and namespace.get("__name__") == "__main__" else namespace
        file = namespace.get("__file__") or (top.f_code.co_filename if top else "<unknown>")
        held = {name: value for name, value in namespace.items() if name in live and not name.startswith("__")}
        yield root(file, "<module>", namespace), _By.GLOBAL, held

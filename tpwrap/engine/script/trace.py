"""What a rank computed, step by step, as digests in a file: how a rehearsal sees whether two runs are equal.

A rehearsal (`tpwrap --rehearse`) runs the script twice for a few updates and compares what is written here
(`tpwrap.report.traces`). TORCHPASS_REHEARSE holds the number of updates and the directory, "6,/tmp/…/trace".

    trace = Trace.begin(rank, session)     # None: this is no rehearsal
    trace.entered()                        # when a newcomer goes live
    trace.batch(batch)                     # each batch that the script is given,
    trace.loss(root)                       # each tensor that backward starts from,
    trace.commit(step, digests, scalars, values, random)    # and each update, only while this rank is live
    if trace.done(step):                   # outside of the commit gate: others may still need to be healed
        leave(runtime, step)
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from tpwrap.engine import encoding
from tpwrap.engine.randomness import State
from tpwrap.engine.script.files import is_script_file
from tpwrap.engine.script.liveness import live_names

if TYPE_CHECKING:
    from tpwrap.engine.runtime import Runtime

VARIABLE = "TORCHPASS_REHEARSE"
_LONGEST = 80
"""characters of a value that is shown as it is"""
_DEEPEST = 12
"""levels of nesting that are looked at: a list may hold itself"""


def rehearsing() -> bool:
    """Whether this process is part of a rehearsal."""
    return VARIABLE in os.environ


def speak() -> None:
    """What the script prints is not muted: it goes to the log of the run, where people look when the run fails."""
    for stream in (sys.stdout, sys.stderr):
        getattr(getattr(stream, "buffer", stream), "__dict__", {}).pop("write", None)


def directory() -> Path:
    """Where the traces of this run go."""
    return Path(os.environ[VARIABLE].partition(",")[2])


_FIXED = (ModuleType, FunctionType, BuiltinFunctionType, type, torch.nn.Module)
"""types of variables that say nothing: definitions, and models, whose weights are compared anyway"""


class Trace:
    """The trace of one rank: a line of JSON for each update, in the file of the rank. A newcomer goes on in the file of
    the rank that it replaces."""

    def __init__(self, place: Path, rank: int, updates: int, session: bool) -> None:
        self.updates = updates
        self._session = session
        self._batches: list[str] = []
        self._losses: list[str] = []
        # Our own descriptor, opened before the script's files are watched.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(place / f"rank{rank}.jsonl", flags, 0o600)

    @staticmethod
    def begin(rank: int, session: bool) -> Trace | None:
        """The trace that this process is to write, if this is a rehearsal. session: the script has the two lines."""
        if not rehearsing():
            return None
        speak()
        return Trace(directory(), rank, int(os.environ[VARIABLE].partition(",")[0]), session)

    def batch(self, tree: Any) -> None:
        """The script was given a batch."""
        self._batches.append(shown(tree))

    def loss(self, root: torch.Tensor) -> None:
        """Backward starts from `root`."""
        self._losses.append(repr(root.item()) if root.numel() == 1 else shown(root))

    def commit(
        self, step: int, digests: Mapping[str, str], scalars: bytes, values: Mapping[str, Any], random: State
    ) -> None:
        """Update number `step` is applied.

        digests: `ReplicaState.digests()`. scalars: `ReplicaState.scalars()`. values: what else decides how the script
        goes on, by the names it has there (registered state, variables, the place in the data).
        """
        record = {
            "step": step,
            "session": self._session,
            "batch": self._batches,
            "random": {name: shown(part) for name, part in random._asdict().items()},
            "values": {name: shown(value) for name, value in values.items()},
            "loss": self._losses,
            "scalars": {name: shown(value) for part in encoding.decode(scalars).values() for name, value in flat(part)},
            "state": dict(digests),
        }
        os.write(self._file, (json.dumps(record) + "\n").encode())  # one write: a kill cuts no line in two
        self._batches, self._losses = [], []

    def entered(self) -> None:
        """A newcomer is live now. What it was given on its way belongs to the step before."""
        self._batches, self._losses = [], []

    def done(self, step: int) -> bool:
        """Whether `step` was the last update of the rehearsal."""
        return step >= self.updates


def variables(frame: FrameType | None) -> dict[str, Any]:
    """What the script may still read, of the frames from `frame` outwards: by name, with the function's in front."""
    found: dict[str, Any] = {}
    while frame is not None:
        code = frame.f_code
        if is_script_file(code.co_filename):
            owner = "" if code.co_name == "<module>" else f"{code.co_name}."
            bound = frame.f_locals
            found.update({owner + name: bound[name] for name in sorted(live_names(frame)) if _is_state(bound, name)})
        frame = frame.f_back
    return found


def _is_state(bound: Mapping[str, Any], name: str) -> bool:
    """Whether the variable is bound, and to something that a training loop changes."""
    return name in bound and not isinstance(bound[name], _FIXED) and not (name.startswith("__") and name.endswith("__"))


def leave(runtime: Runtime, step: int) -> NoReturn:
    """End this rank as if its script were over, without running any more of it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    runtime.finish(step)
    os._exit(0)


def shown(value: Any) -> str:
    """A value as text that is equal for equal values: itself if it is short, else its type and a digest. Objects that
    are not plain data are told by their type alone."""
    text = _text(value)
    if len(text) <= _LONGEST:
        return text
    return f"{type(value).__name__} {_hash(text.encode())}"


def flat(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """Nested dicts, and lists of them, as a list of (path, value): ('groups 0 lr', 0.1)."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in flat(item, (*path, str(key)))]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [pair for index, item in enumerate(value) for pair in flat(item, (*path, str(index)))]
    return [(" ".join(path), value)]


def _text(value: Any, depth: int = 0) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, (bytes, bytearray)):
        return f"bytes {_hash(value)}"
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        data = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        return f"array {array.dtype} {list(array.shape)} {_hash(data)}"
    if depth == _DEEPEST:
        return "…"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(k, depth + 1)}: {_text(v, depth + 1)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [_text(item, depth + 1) for item in value]
        return "[" + ", ".join(sorted(parts) if isinstance(value, (set, frozenset)) else parts) + "]"
    opaque = isinstance(value, (torch.nn.Module, type)) or type(value).__module__.partition(".")[0] == "torch"
    held = {} if opaque else getattr(value, "__dict__", {})
    return f"<{type(value).__qualname__}>" + (_text({k: v for k, v in held.items() if _plain(v)}) if held else "")


def _plain(value: Any) -> bool:
    """Whether an attribute of an object is a number or text. (Further objects may lead round in circles, and a tensor
    may be one that nobody will ever read.)"""
    return isinstance(value, (bool, int, float, str, bytes, np.generic))


def _tensor(tensor: torch.Tensor) -> str:
    kind = f"tensor {encoding.dtype_name(tensor.dtype)} {list(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return f"{kind} {tensor.layout}"
    return f"{kind} {_hash(encoding.tensor_bytes(tensor))}"


def _hash(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

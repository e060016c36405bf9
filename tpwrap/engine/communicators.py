"""Process groups that keep their identity while what is inside them is rebuilt.

`install` puts our constructor where torch looks for ProcessGroupGloo and ProcessGroupNCCL. Each process group that the
script creates then holds one `JournaledBackend` for good; `Communicators` builds, aborts, probes and replaces the
inner backend behind it, once per generation. Names, ranks and objects never change, so DDP's reducer, meshes and user
code keep their references.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import inspect
import threading
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_c10d
from torch._C import _distributed_c10d as c10d

from tpwrap.engine import _native, sockets
from tpwrap.engine.inner import GlooInner, Inner, NcclInner, Place, abort_all, probe

_RealGloo = c10d.ProcessGroupGloo
_RealNccl = getattr(c10d, "ProcessGroupNCCL", None)


_FOREVER = dt.timedelta(days=30)


class Aborted(RuntimeError):
    """This generation was given up while we worked on it; the next plan is on its way."""


class Poisoned(BaseException):
    """Ends a pass that will be redone; no `except Exception` of the script is to stop it."""


Outputs: TypeAlias = list[list[torch.Tensor]]
"""by operation and tensor"""
Record: TypeAlias = tuple[Outputs, Outputs]


@dataclass
class Communicator:
    """One process group and device type."""

    name: str
    index: int
    """position among all that this process created: equal on every process that runs the script as this rank"""
    occasion: int
    """how many groups of that name were made before (a script may destroy the default group and start again); equal
    on every member, as the index is not: each rank counts the groups that it is a member of"""
    group: _native.Group
    backend: _native.JournaledBackend
    device: torch.device
    timeout: dt.timedelta
    nccl_options: Any
    inner: Inner | None = None
    generation: int = -1
    """of `inner`, once it stands"""
    building: threading.Lock = field(default_factory=threading.Lock)
    """the script's thread and a recovery may both find that this group has to be built"""

    def new_inner(self) -> Inner:
        if self.backend.name() == "gloo":
            return GlooInner(_RealGloo)
        return NcclInner(self.nccl_options)


@dataclass
class _Generation:
    """What one generation shares: a store client of its own, so that cutting its socket ends every rendezvous."""

    number: int
    store: c10d.Store
    connection: set[tuple[sockets.Address, sockets.Address]]
    """of the store client (of all, where groups are built apart)"""
    aborted: threading.Event = field(default_factory=threading.Event)
    inners: list[Inner] = field(default_factory=list)


class Communicators:
    """All communicators of this worker.

    journal: the native journal. store: "host:port" of the job's store. connect_timeout: seconds to build one.
    """

    def __init__(self, journal: _native.Journal, store: str, connect_timeout: float) -> None:
        self.journal = journal
        self.all: list[Communicator] = []
        self._store = store
        self._connect_timeout = connect_timeout
        self._lock = threading.Lock()
        self._generation: _Generation | None = None
        self._created = 0
        self._records: list[Record] = []
        self._left_behind: list[Any] = []
        self.offline = False
        """a newcomer before its point of entry: groups are created without an inner backend"""
        self.poisoned = False
        """this pass will be redone; what it computes is garbage"""

    # --- generations ------------------------------------------------------------------------------

    def begin(self, generation: int) -> None:
        """Enter `generation`: later builds meet under its keys."""
        client, connection = self._connect()
        with self._lock:
            if self._generation is not None and self._generation.number >= generation:
                return
            self._generation = _Generation(generation, client, connection)

    @property
    def generation(self) -> int:
        """The newest one that was begun."""
        with self._lock:
            return -1 if self._generation is None else self._generation.number

    def _connect(self) -> tuple[c10d.Store, set[tuple[sockets.Address, sockets.Address]]]:
        host, _, port = self._store.rpartition(":")
        return _store_client(host, int(port), self._connect_timeout)

    def abort(self, deadline: float) -> bool:
        """Give up the current generation: every operation and every rendezvous in it fails at once."""
        with self._lock:
            generation = self._generation
            if generation is None or generation.aborted.is_set():
                return True
            generation.aborted.set()
            inners = list(generation.inners)
        sockets.cut(lambda local, remote: (local, remote) in generation.connection)
        return abort_all(inners, deadline)

    def cut_again(self) -> None:
        """Abort once more what `abort` has aborted."""
        for communicator in list(self.all):
            if communicator.inner is not None:
                communicator.inner.abort()

    def leave_behind(self) -> None:
        """Keep for ever those inner backends whose operations do not end, so that `drop` does not destroy them: that
        would wait for the operations."""
        self._left_behind += [one.group.inner for one in self.all if one.group.in_flight]

    def drop(self) -> None:
        """Let go of the aborted inner backends (their threads are joined; nothing may be in flight)."""
        for communicator in list(self.all):
            communicator.inner = None
            communicator.group.adopt(None)
        with self._lock:
            if self._generation is not None and self._generation.aborted.is_set():
                self._generation.inners.clear()

    # --- building ---------------------------------------------------------------------------------

    def attach(self, communicator: Communicator) -> None:
        """A process group was just created by the script: build its inner backend (unless offline)."""
        self.all.append(communicator)
        if communicator.index < len(self._records):
            communicator.group.serve(*self._records[communicator.index])
        if self.offline:
            return
        generation = self._current()
        try:
            self._build(communicator, generation, generation.store)
        except RuntimeError:
            if not generation.aborted.is_set():
                raise
            # A failure during the rendezvous: the script may go on, its operations queue up, and the recovery that is
            # under way builds all attached groups, this one included.

    def rebuild(self, groups: list[Communicator]) -> None:
        """Build and probe the inner backends of the current generation for `groups`, one after the other.

        In the order of their creation, which is the same on all members. Not in several threads: a store client serves
        one caller at a time, and who waits there for another member keeps all others waiting; with groups that overlap,
        ranks would wait for each other in a circle. Raises Aborted.
        """
        generation = self._current()
        for communicator in groups:
            try:
                self._build(communicator, generation, generation.store)
            except BaseException as error:
                if generation.aborted.is_set():
                    raise Aborted("the generation was given up during the rebuild") from error
                raise

    def rebuild_apart(self, groups: list[Communicator]) -> None:
        """Begin to rebuild groups that other members may come to later, and in another order; does not wait.

        Each has a thread and a store client of its own, so that none keeps another one waiting. What fails is given up:
        the next generation builds it.
        """
        generation = self._current()

        def build(communicator: Communicator) -> None:
            with contextlib.suppress(RuntimeError):
                self._build(communicator, generation, self._store_apart(generation))

        for communicator in groups:
            threading.Thread(target=build, args=(communicator,), name="torchpass-build", daemon=True).start()

    def build_own(self, name: str, rank: int, size: int) -> Any:
        """A backend for the engine's own use in the current generation, among all ranks; waits until all have come.
        Raises RuntimeError once the generation is given up."""
        generation = self._current()
        store, inner = self._store_apart(generation), GlooInner(_RealGloo)
        self._enlist(generation, inner)
        prefix = f"g{generation.number}/torchpass-{name}"
        # As long as it takes: another rank may be slow, and a failure gives the generation up.
        backend = inner.create(Place(c10d.PrefixStore(prefix, store), rank, size, _FOREVER, _FOREVER))
        probe(backend, rank, size, torch.device("cpu"))
        return backend

    def _store_apart(self, generation: _Generation) -> c10d.Store:
        """A store client that ends with the generation. Raises Aborted."""
        store, connection = self._connect()
        with self._lock:
            if generation.aborted.is_set():
                raise Aborted("the generation was given up")
            generation.connection = generation.connection | connection
        return store

    def _enlist(self, generation: _Generation, inner: Inner) -> None:
        """It is aborted with the generation from now on. Raises Aborted."""
        with self._lock:
            if generation.aborted.is_set():
                raise Aborted("the generation was given up")
            generation.inners.append(inner)

    def _build(self, communicator: Communicator, generation: _Generation, store: c10d.Store) -> None:
        with communicator.building:
            if communicator.generation < generation.number:
                self._build_locked(communicator, generation, store)

    def _build_locked(self, communicator: Communicator, generation: _Generation, store: c10d.Store) -> None:
        inner = communicator.new_inner()
        self._enlist(generation, inner)
        group = communicator.group
        name = f"{communicator.name}#{communicator.occasion}"
        prefix = f"g{generation.number}/{name}/{communicator.device.type}"
        backend = inner.create(
            Place(
                c10d.PrefixStore(prefix, store),
                group.rank,
                group.size,
                dt.timedelta(seconds=self._connect_timeout),
                communicator.timeout,
            )
        )
        probe(backend, group.rank, group.size, communicator.device)
        if generation.aborted.is_set():
            raise Aborted("the generation was given up")
        communicator.inner = inner
        communicator.generation = generation.number
        group.adopt(backend)

    def _current(self) -> _Generation:
        with self._lock:
            if self._generation is None:
                raise RuntimeError("torchpass: a process group was created before this worker was assigned a rank")
            return self._generation

    # --- set-up record ----------------------------------------------------------------------------

    def record(self) -> list[Record]:
        """Outputs of the collectives before the first step, and small ones of the first step: by group."""
        return [(one.group.record(), one.group.first()) for one in self.all]

    @property
    def has_first(self) -> bool:
        """Whether a newcomer needs to know what the first step's operations gave."""
        return any(one.group.first() for one in self.all)

    def serve(self, records: list[Record]) -> None:
        """Answer the set-up's collectives from `records` in groups that are created from now on."""
        self._records = records

    def next_index(self) -> int:
        self._created += 1
        return self._created - 1


def _store_client(
    host: str, port: int, seconds: float
) -> tuple[c10d.Store, set[tuple[sockets.Address, sockets.Address]]]:
    """A client of the job's store, and its connection."""
    with _connecting:
        before = sockets.connections()
        client = c10d.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=dt.timedelta(seconds=seconds)
        )
        fresh = {(local, remote) for local, remote in sockets.connections() - before if remote[1] == port}
    # More than one only if the script connects to the same store in another thread at this very moment; then cutting
    # none means that a rendezvous ends by its own time-out.
    return client, fresh if len(fresh) == 1 else set()


_connecting = threading.Lock()


def _backends(pg: dist.ProcessGroup) -> list[tuple[torch.device, Any]]:
    return [(torch.device(device), pg._get_backend(torch.device(device))) for device in pg._device_types]


# --- installation in torch ----------------------------------------------------------------------------


def install(communicators: Communicators) -> None:
    """Make torch build our backends. Call once, before the script creates a process group."""
    journal = communicators.journal
    made: list[Any] = []  # keeps the Python side of each backend, and with it what is noted on it, alive

    class _Constructor(type):
        name: str
        real: Any

        def __call__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            group = journal.group("", rank, size, cls.name != "gloo")
            backend = _native.JournaledBackend(group, cls.name)
            options = args[0] if args else kwargs.get("options")
            backend.options = SimpleNamespace() if cls.name == "gloo" else options
            backend.timeout = kwargs.get("timeout") or getattr(options, "_timeout", None)
            backend.group = group
            made.append(backend)
            return backend

        def __instancecheck__(cls, instance: Any) -> bool:
            if isinstance(instance, _native.JournaledBackend):
                return bool(instance.name() == cls.name)
            return cls.real is not None and isinstance(instance, cls.real)

        def __getattr__(cls, attribute: str) -> Any:
            return getattr(cls.real, attribute)

    class ProcessGroupGloo(metaclass=_Constructor):
        name = "gloo"
        real = _RealGloo

    class ProcessGroupNCCL(metaclass=_Constructor):
        name = "nccl"
        real = _RealNccl

    torch_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc,assignment]
    if _RealNccl is not None:
        torch_c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc,assignment]

    def set_default_timeout(backend: Any, timeout: dt.timedelta) -> None:
        """torch's way to change a group's time-out: it is that of what is built from now on."""
        for communicator in communicators.all:
            if communicator.backend is backend:
                communicator.timeout = timeout

    _native.JournaledBackend._set_default_timeout = set_default_timeout  # type: ignore[attr-defined]

    original = torch_c10d._new_process_group_helper
    parameters = inspect.signature(original)
    occasions: Counter[str] = Counter()

    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        name = parameters.bind(*args, **kwargs).arguments["group_name"]
        occasion = occasions[name]
        occasions[name] += 1  # also where this rank is no member
        pg, store = original(*args, **kwargs)
        if isinstance(pg, dist.ProcessGroup):
            # "gloo" names one backend for several device types.
            backends = {id(b): (b, device) for device, b in _backends(pg)}
            for backend, device in backends.values():
                if isinstance(backend, _native.JournaledBackend):
                    communicators.attach(
                        Communicator(
                            name=pg.group_name,
                            index=communicators.next_index(),
                            occasion=occasion,
                            group=backend.group,
                            backend=backend,
                            device=torch.device("cpu") if backend.name() == "gloo" else device,
                            timeout=backend.timeout or torch_c10d.default_pg_timeout,
                            nccl_options=backend.options,
                        )
                    )
        return pg, store

    torch_c10d._new_process_group_helper = helper
    for name in _OF_OBJECTS:
        _refuse_when_poisoned(communicators, name)

    broadcast_objects = torch_c10d.broadcast_object_list

    @functools.wraps(broadcast_objects)
    def broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        if communicators.offline:
            _recorded_objects(object_list, *args, **kwargs)
        else:
            broadcast_objects(object_list, *args, **kwargs)

    torch_c10d.broadcast_object_list = broadcast_object_list
    dist.broadcast_object_list = broadcast_object_list


_OF_OBJECTS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "new_group",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


def _refuse_when_poisoned(communicators: Communicators, name: str) -> None:
    """End the pass there: an echo is no pickle, and a group made now would be made once more."""
    original = getattr(torch_c10d, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if communicators.poisoned:
            raise Poisoned
        return original(*args, **kwargs)

    setattr(torch_c10d, name, function)
    setattr(dist, name, function)


def _recorded_objects(
    object_list: list[Any],
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """`broadcast_object_list` of a newcomer that is not live, by the record alone.

    torch's own neither reads back what the source has sent (a replaced source would keep the run id that it has just
    made up, unlike all others) nor sets sizes on the other ranks. Without a record the list stays as it is.
    """
    if torch_c10d._rank_not_in_group(group):
        return
    pg = torch_c10d._group_or_default_group(group)
    if src is None and group_src is None:
        src = 0
    where = device or torch_c10d._get_object_coll_device(pg)
    sizes = torch.full((len(object_list),), -1, dtype=torch.long, device=where)
    dist.broadcast(sizes, src=src, group=pg, group_src=group_src)
    ends = sizes.cumsum(0).tolist()
    if not ends or min(sizes.tolist()) < 0:
        return
    data = torch.zeros(ends[-1], dtype=torch.uint8, device=where)
    dist.broadcast(data, src=src, group=pg, group_src=group_src)
    if not data.any():  # no pickle is all zeros: there was no room for it in the record
        raise RuntimeError("torchpass: objects that were broadcast in set-up are too large to be recorded")
    for i, (end, size) in enumerate(zip(ends, sizes.tolist(), strict=True)):
        object_list[i] = torch_c10d._tensor_to_object(data[end - size : end], size, pg)

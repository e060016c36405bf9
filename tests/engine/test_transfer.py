"""State on its way: sources that die, freeze or lie, what is already there, and how much memory it takes.

Sources are real processes; what happens to one, it does to itself in the middle of an answer (`at_serving`).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import pytest
import torch

from tpwrap.control.sidecars import receive_exactly
from tpwrap.engine import pieces, transfer
from tpwrap.engine.state import ReplicaState, StateError
from tpwrap.engine.transfer import Offer, StateServer

KEY = b"k" * 32
PIECE = 64 << 10
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "tpwrap.engine.transfer"])


def state_of(tensors: dict[str, torch.Tensor]) -> ReplicaState:
    return ReplicaState.of({}, {}, {}, lambda: tensors)


def some_tensors(seed: int) -> dict[str, torch.Tensor]:
    """A large one, many small ones, and odd ones; 2 MB."""
    generator = torch.Generator().manual_seed(seed)
    made = {f"small{i}": torch.randn(7, i + 1, generator=generator) for i in range(40)}
    made["large"] = torch.randn(400, 1000, generator=generator)
    made["turned"] = torch.randn(300, 200, generator=generator).t()
    made["last"] = torch.randn(4, 8, 16, 16, generator=generator).to(memory_format=torch.channels_last)
    made["every"] = torch.randn(100, 30, generator=generator)[::2, ::3]
    made["empty"] = torch.empty(0, 3)
    made["count"] = torch.tensor(seed)
    made["half"] = torch.randn(999, generator=generator).bfloat16()
    made["eighth"] = torch.randn(999, generator=generator).to(torch.float8_e4m3fn)
    made["mask"] = torch.randn(999, generator=generator) > 0
    made["complex"] = torch.randn(50, 60, dtype=torch.complex64, generator=generator).t()
    return made


def serve(pipe: Connection, faults: dict[int, signal.Signals], piece: int, everybody: Barrier) -> None:
    """The process of a source: its state, and the signal that it sends itself when it serves for the n-th time. None
    goes on before everybody serves."""
    pieces.PIECE = piece
    count = itertools.count(1)
    together = threading.Event()

    def at_serving() -> None:
        served = next(count)
        if served == 1:
            everybody.wait(100.0)
            together.set()
        together.wait(100.0)
        if served in faults:
            os.kill(os.getpid(), faults[served])

    server = StateServer("127.0.0.1", KEY)
    state = state_of(some_tensors(1))
    server.offer(Offer(0, 0, state, state.scalars(), at_serving=at_serving))
    pipe.send(server.address)
    pipe.recv()


class Source:
    def __init__(self, faults: dict[int, signal.Signals], everybody: Barrier) -> None:
        self.everybody = everybody  # lives as long as the process may ask for it
        self.pipe, other = _processes.Pipe()
        self.process = _processes.Process(target=serve, args=(other, faults, PIECE, everybody), daemon=True)
        self.process.start()

    @property
    def address(self) -> str:
        address: str = self.pipe.recv()
        return address


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Source]]]:
    monkeypatch.setattr(pieces, "PIECE", PIECE)  # as in the sources: digests of large tensors depend on it
    made: list[Source] = []

    def make(*faults: dict[int, signal.Signals]) -> list[Source]:
        everybody = _processes.Barrier(len(faults))
        started = [Source(one, everybody) for one in faults]
        made.extend(started)
        return started

    yield make
    for source in made:
        source.process.kill()
        source.process.join()


def restore(
    tensors: dict[str, torch.Tensor],
    addresses: list[str],
    timeout: float = 60.0,
    aborted: Callable[[], bool] = lambda: False,
) -> int:
    """The bytes moved."""
    inventory, moved = transfer.restore(state_of(tensors), addresses, KEY, 0, 0, timeout, aborted)
    assert inventory.digests == state_of(tensors).digests()
    return moved


def assert_restored(tensors: dict[str, torch.Tensor]) -> None:
    for name, expected in some_tensors(1).items():
        assert torch.equal(tensors[name], expected), name
        assert tensors[name].stride() == expected.stride(), name


SIZE = sum(tensor.nbytes for tensor in some_tensors(0).values())


@pytest.mark.parametrize("count", [1, 3])
def test_everything_arrives_from_all_sources(sources, count: int) -> None:
    tensors = some_tensors(2)
    assert SIZE - PIECE < restore(tensors, [one.address for one in sources(*[{}] * count)]) <= SIZE
    assert_restored(tensors)


@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
def test_who_is_killed_in_the_middle_of_an_answer_is_done_without(sources, victims: list[int]) -> None:
    made = sources(*({1: signal.SIGKILL} if i in victims else {} for i in range(3)))
    tensors = some_tensors(2)
    moved = restore(tensors, [one.address for one in made])
    assert_restored(tensors)
    assert moved <= SIZE  # nothing that was whole is fetched again
    for i in victims:
        made[i].process.join(20.0)
    assert [one.process.is_alive() for one in made] == [i not in victims for i in range(3)]


@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
def test_who_freezes_in_the_middle_of_an_answer_is_done_without(sources, victims: list[int]) -> None:
    made = sources(*({1: signal.SIGSTOP} if i in victims else {} for i in range(3)))
    tensors = some_tensors(2)
    restore(tensors, [one.address for one in made], timeout=20.0)
    assert_restored(tensors)


def test_who_is_already_frozen_or_gone_before_it_is_asked(sources) -> None:
    gone, frozen, good = (sources({})[0] for _ in range(3))
    addresses = [one.address for one in (gone, frozen)]
    gone.process.kill()
    os.kill(frozen.process.pid, signal.SIGSTOP)
    tensors = some_tensors(2)
    restore(tensors, ["127.0.0.1:1", *addresses, good.address], timeout=20.0)
    assert_restored(tensors)


def test_what_has_come_before_all_sources_died_need_not_come_again(sources) -> None:
    tensors = some_tensors(2)
    with pytest.raises(ConnectionError):
        restore(tensors, [one.address for one in sources({4: signal.SIGKILL}, {4: signal.SIGKILL})])
    assert PIECE < SIZE - restore(tensors, [sources({})[0].address]) < SIZE
    assert_restored(tensors)


def test_the_last_source_that_freezes_is_waited_for_until_the_time_is_up(sources) -> None:
    made = sources({3: signal.SIGSTOP}, {2: signal.SIGKILL})
    with pytest.raises(TimeoutError):
        restore(some_tensors(2), [one.address for one in made], timeout=2.0)


def test_a_frozen_source_that_goes_on_is_used_again(sources) -> None:
    (one,) = sources({3: signal.SIGSTOP})
    address = one.address
    threading.Timer(1.0, lambda: os.kill(one.process.pid, signal.SIGCONT)).start()
    tensors = some_tensors(2)
    restore(tensors, [address, "127.0.0.1:1"])
    assert_restored(tensors)


def test_a_plan_that_is_given_up_ends_it_at_once(sources) -> None:
    made = sources({1: signal.SIGSTOP}, {1: signal.SIGSTOP})
    given_up = threading.Event()
    threading.Timer(0.5, given_up.set).start()
    addresses = [one.address for one in made]
    with ThreadPoolExecutor(1) as beside:
        outcome = beside.submit(
            transfer.restore, state_of(some_tensors(2)), addresses, KEY, 0, 0, 600.0, given_up.is_set
        )
        with pytest.raises(ConnectionAbortedError, match="given up"):
            outcome.result(60.0)


def test_without_sources_the_state_is_what_it_is() -> None:
    tensors = some_tensors(2)
    assert restore(tensors, []) == 0
    assert all(torch.equal(tensors[name], tensor) for name, tensor in some_tensors(2).items())


def offered(tensors: dict[str, torch.Tensor]) -> tuple[StateServer, Offer]:
    state = state_of(tensors)
    server, offer = StateServer("127.0.0.1", KEY), Offer(0, 0, state, state.scalars())
    server.offer(offer)
    return server, offer


def test_of_a_large_tensor_only_the_pieces_that_differ_move() -> None:
    theirs = {"frozen": torch.zeros(3 * pieces.PIECE, dtype=torch.uint8), "other": torch.ones(10)}
    mine = {name: tensor.clone() for name, tensor in theirs.items()}
    theirs["frozen"][pieces.PIECE + 1000] = 1
    server, _ = offered(theirs)
    assert restore(mine, [server.address]) == pieces.PIECE
    assert torch.equal(mine["frozen"], theirs["frozen"])
    assert restore(mine, [server.address]) == 0


@pytest.mark.parametrize("name", ["large", "turned", "count", "mask"])
def test_what_is_not_what_its_source_has_digested_is_refused_by_name(name: str) -> None:
    theirs = some_tensors(1)
    server, offer = offered(theirs)
    offer.digests()
    theirs[name].copy_(some_tensors(3)[name])
    with pytest.raises(StateError, match=f"extra/{name} was received with another digest than it has at its source"):
        restore(some_tensors(2), [server.address])


def test_a_generation_that_is_over_is_cut_off_in_the_middle_of_an_answer() -> None:
    """Else its thread would send what is being trained with, until a newcomer that is gone has read it."""
    server, _ = offered({"large": torch.ones(64 << 20, dtype=torch.uint8)})
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 20.0) as connection:
        connection.sendall(transfer._token(KEY, receive_exactly(connection, 16)))
        wanted = transfer.Request(0, 0, [(n, "") for n in range(16)])
        transfer._ask(connection, wanted, 20.0, lambda: False)
        (size,) = struct.unpack("<I", receive_exactly(connection, 4))
        receive_exactly(connection, size)
        got = len(receive_exactly(connection, 1 << 20))
        server.withdraw(1)
        while data := connection.recv(1 << 20):
            got += len(data)
    assert got < 64 << 20


ROWS, COLUMNS = 5000, 6000
"""of a tensor of 120 MB"""


def odd(fill: float) -> dict[str, torch.Tensor]:
    """Not contiguous, made without any other memory."""
    return {"turned": torch.empty(COLUMNS, ROWS).fill_(fill).t()}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def as_source(pipe: Connection) -> None:
    state = state_of(odd(1.0))
    before = peak()
    server = StateServer("127.0.0.1", KEY)
    server.offer(Offer(0, 0, state, state.scalars()))
    pipe.send(server.address)
    pipe.recv()
    pipe.send(peak() - before)


def as_newcomer(pipe: Connection) -> None:
    tensors = odd(2.0)
    addresses = pipe.recv()
    before = peak()
    moved = restore(tensors, addresses)
    pipe.send((peak() - before, moved, bool((tensors["turned"] == 1.0).all())))


def test_nobody_holds_more_than_a_few_pieces_beside_a_large_tensor() -> None:
    started = []
    pipes = []
    for role in (as_source, as_source, as_newcomer):
        mine, other = _processes.Pipe()
        process = _processes.Process(target=role, args=(other,), daemon=True)
        process.start()
        started.append(process)
        pipes.append(mine)
    *sources, newcomer = pipes
    newcomer.send([pipe.recv() for pipe in sources])
    grown, moved, equal = newcomer.recv()
    assert equal
    assert moved == 4 * ROWS * COLUMNS
    assert grown < 8 * pieces.PIECE
    for pipe in sources:
        pipe.send("done")
        assert pipe.recv() < 8 * pieces.PIECE
    for process in started:
        process.join(20.0)
        assert process.exitcode == 0

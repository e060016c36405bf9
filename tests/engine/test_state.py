"""What moves from a replica to a newcomer: complete, exact, and refused where the two do not match."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tpwrap.control.sidecars import receive_exactly
from tpwrap.engine import _native, pieces, transfer
from tpwrap.engine.gate import CommitGate
from tpwrap.engine.state import ReplicaState, StateError, combined
from tpwrap.engine.transfer import Offer, StateServer

KEY = b"k" * 32
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.5}, {"params": p[1:]}]),
}


def make(optimizer: str, seed: int) -> ReplicaState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(300, 40), torch.nn.Linear(40, 3))
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    return ReplicaState(model, made, torch.optim.lr_scheduler.StepLR(made, 2))


def train(state: ReplicaState, steps: int) -> None:
    for step in range(steps):
        state.optimizer.zero_grad()
        state.model(torch.full((2, 300), 0.1 * step)).sum().backward()
        state.optimizer.step()
        state.scheduler.step()


@pytest.mark.parametrize("sources", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_newcomer_trains_on_as_its_replica(optimizer: str, sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1000)  # several pieces for each source
    replica, newcomer = make(optimizer, 1), make(optimizer, 2)
    train(replica, 5)
    servers = [StateServer("127.0.0.1", KEY) for _ in range(sources)]
    for server in servers:
        server.offer(Offer(3, 5, replica, replica.scalars()))
    inventory, moved = transfer.restore(newcomer, [s.address for s in servers], KEY, 3, 5, 5.0, lambda: False)
    assert inventory.digests == newcomer.digests() == replica.digests()
    assert inventory.scalars == newcomer.scalars() == replica.scalars()
    assert moved > 48_000
    for state in (replica, newcomer):
        train(state, 5)
    assert newcomer.digests() == replica.digests()
    assert newcomer.scalars() == replica.scalars()


def test_everybody_hashes_its_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source does, however many newcomers ask, and its own report included; a newcomer does when it has received."""
    replica, newcomers = make("sgd", 1), [make("sgd", seed) for seed in (2, 3)]
    server = StateServer("127.0.0.1", KEY)
    offer = Offer(0, 0, replica, replica.scalars())
    server.offer(offer)
    hashed: list[int] = []
    digests, data_ptr = _native.digests, torch.Tensor.data_ptr
    monkeypatch.setattr(_native, "digests", lambda tensors: hashed.extend(map(data_ptr, tensors)) or digests(tensors))
    reports = []
    for newcomer in newcomers:
        inventory, _ = transfer.restore(newcomer, [server.address], KEY, 0, 0, 5.0, lambda: False)
        reports.append(combined(inventory.digests, inventory.scalars))
    reports.append(combined(offer.digests(), offer.scalars))
    assert len(set(reports)) == 1
    assert sorted(hashed) == sorted(data_ptr(t) for one in (replica, *newcomers) for t in one.tensors().values())


def test_a_source_that_changes_after_it_has_told_its_digests_is_refused() -> None:
    replica, newcomer = make("sgd", 1), make("sgd", 2)
    server = StateServer("127.0.0.1", KEY)
    offer = Offer(0, 0, replica, replica.scalars())
    server.offer(offer)
    offer.digests()
    next(iter(replica.tensors().values())).view(-1)[7] += 1
    with pytest.raises(StateError, match=r"model/0\.weight was received with another digest"):
        transfer.restore(newcomer, [server.address], KEY, 0, 0, 5.0, lambda: False)


def test_equal_tensors_are_not_moved() -> None:
    replica, newcomer = make("sgd", 1), make("sgd", 1)
    server = StateServer("127.0.0.1", KEY)
    server.offer(Offer(0, 0, replica, replica.scalars()))
    assert transfer.restore(newcomer, [server.address], KEY, 0, 0, 5.0, lambda: False)[1] == 0


def test_a_source_answers_only_for_its_generation_and_step() -> None:
    replica = make("sgd", 1)
    server = StateServer("127.0.0.1", KEY)
    server.offer(Offer(4, 7, replica, replica.scalars()))
    for generation, step in ((3, 7), (4, 8)):
        with pytest.raises(ConnectionError):
            transfer.restore(make("sgd", 2), [server.address], KEY, generation, step, 5.0, lambda: False)
    with pytest.raises(ConnectionError):
        transfer.restore(make("sgd", 2), [server.address], b"wrong", 4, 7, 5.0, lambda: False)


def test_a_request_that_comes_before_its_plan_waits_for_the_offer() -> None:
    """A newcomer from a recovery that was hit is quick to ask; a source may still be connecting its new buddies."""
    replica, newcomer = make("sgd", 1), make("sgd", 2)
    server = StateServer("127.0.0.1", KEY)
    server.withdraw(3)
    asking = threading.Thread(
        target=lambda: transfer.restore(newcomer, [server.address], KEY, 3, 7, 10.0, lambda: False)
    )
    asking.start()
    asking.join(0.2)
    assert asking.is_alive()
    server.offer(Offer(3, 7, replica, replica.scalars()))
    asking.join(10.0)
    assert newcomer.digests() == replica.digests()


def test_a_waiting_request_is_refused_as_soon_as_its_generation_is_given_up() -> None:
    server = StateServer("127.0.0.1", KEY)
    threading.Timer(0.2, server.withdraw, [4]).start()
    with pytest.raises(ConnectionError):
        transfer.restore(make("sgd", 2), [server.address], KEY, 3, 7, 10.0, lambda: False)


@pytest.mark.parametrize("cut_after", [0, 16, 9000], ids=["greeting", "question", "tensors"])
def test_a_silent_source_holds_no_newcomer_whose_recovery_was_given_up(
    cut_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1000)
    replica = make("sgd", 1)
    server = StateServer("127.0.0.1", KEY)
    server.offer(Offer(0, 0, replica, replica.scalars()))
    given_up = threading.Event()
    threading.Timer(0.3, given_up.set).start()
    with socket.create_server(("127.0.0.1", 0)) as front:
        threading.Thread(target=cut_link, args=(front, server.address, cut_after), daemon=True).start()
        silent = f"127.0.0.1:{front.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ConnectionAbortedError, match="given up"):
            transfer.restore(make("sgd", 2), [silent], KEY, 0, 0, 60.0, given_up.is_set)
        assert 0.2 < time.monotonic() - began < 20.0


def test_who_does_not_answer_the_challenge_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_HANDSHAKE_SECONDS", 0.2)
    replica = make("sgd", 1)
    server = StateServer("127.0.0.1", KEY)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10.0) as stranger:
        assert len(receive_exactly(stranger, 16)) == 16
        stranger.sendall(b"half an answer")
        assert stranger.recv(1) == b""  # closed
    # Who has answered may wait longer than that for its offer.
    threading.Timer(0.5, server.offer, [Offer(0, 0, replica, replica.scalars())]).start()
    newcomer = make("sgd", 2)
    transfer.restore(newcomer, [server.address], KEY, 0, 0, 10.0, lambda: False)
    assert newcomer.digests() == replica.digests()


def cut_link(front: socket.socket, to: str, limit: int) -> None:
    """Carries everything to the source, and `limit` bytes back before it falls silent."""
    client, _ = front.accept()
    host, _, port = to.rpartition(":")
    source = socket.create_connection((host, int(port)))

    def forth() -> None:
        while data := client.recv(1 << 16):
            source.sendall(data)

    threading.Thread(target=forth, daemon=True).start()
    while limit and (data := source.recv(limit)):
        client.sendall(data)
        limit -= len(data)
    time.sleep(60)


def test_another_model_is_refused_by_name() -> None:
    replica = make("sgd", 1)
    model = torch.nn.Sequential(torch.nn.Linear(300, 41), torch.nn.Linear(41, 3))
    other = ReplicaState(model, torch.optim.SGD(model.parameters()), None)
    with pytest.raises(StateError, match=r"model/0\.weight is \[41, 300\]"):
        other.allocate(replica.manifest())


def test_the_gate_keeps_updates_whole() -> None:
    gate, log = CommitGate(), []
    inside, leave = threading.Event(), threading.Event()

    def update() -> None:
        with gate:
            inside.set()
            leave.wait(5)
            log.append("updated")

    first = threading.Thread(target=update)
    first.start()
    inside.wait(5)
    gate.close()
    second = threading.Thread(target=lambda: (gate.__enter__(), log.append("second")))
    second.start()
    threading.Timer(0.05, leave.set).start()
    gate.settle()
    assert log == ["updated"]
    second.join(0.1)
    assert second.is_alive()
    gate.open()
    second.join(5)
    assert log == ["updated", "second"]

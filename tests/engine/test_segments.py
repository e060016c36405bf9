"""Segments of a rank's tape at its keepers: kept for ever, given to new buddies, fetched in one go, never mixed up."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.engine.test_journal import World
from tpwrap.control import sidecars
from tpwrap.control.sidecars import SETUP_STEP, Put, SidecarServer, segment_step
from tpwrap.engine.communicators import Aborted
from tpwrap.engine.sidecar import Publisher, SidecarLost, fetch, fetch_covering, fetch_segments

KEY = b"k" * 32
RANK = 3


@dataclass
class Keeper:
    server: SidecarServer
    address: str

    def keep(self, step: int, blob: bytes, generation: int = 0) -> None:
        self.server.keep(Put(0, RANK, generation, step, blob))


@pytest.fixture
def keepers() -> Iterator[list[Keeper]]:
    made = []
    for _ in range(3):
        server = SidecarServer(KEY)
        made.append(Keeper(server, f"127.0.0.1:{asyncio.run(server.start('127.0.0.1'))}"))
    yield made
    for keeper in made:
        keeper.server.close()


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of one whose connections are made by the kernel and never served: a node behind a cut link."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def publisher(generation: int = 0) -> Publisher:
    made = Publisher(World(2).live().ranks[0].journal, KEY, RANK, 5.0)
    made.generation = generation
    return made


def tape(length: int, size: int = 20) -> list[bytes]:
    return [(b"%d " % i).ljust(size, b".") for i in range(length)]


def after(seconds: float) -> threading.Event:
    event = threading.Event()
    threading.Timer(seconds, event.set).start()
    return event


def test_a_segment_has_a_step_of_its_own_below_that_of_the_set_up_record() -> None:
    assert [segment_step(i) for i in range(3)] == [-2, -3, -4]
    assert SETUP_STEP not in map(segment_step, range(10))


def test_all_segments_are_kept_however_many_steps_follow(keepers: list[Keeper]) -> None:
    mine = publisher()
    mine.connect(0, [keepers[0].address])
    mine.publish(SETUP_STEP, b"setup")
    for step, segment in enumerate(tape(50)):
        mine.publish_segment(step, segment)
        mine.publish(step, b"sidecar %d" % step)
    mine.wait(5.0)
    at = [keepers[0].address]
    assert fetch_segments(at, KEY, RANK, 50, 5.0) == tape(50)
    assert fetch_segments(at, KEY, RANK, 20, 5.0, beside=49) == tape(20)
    assert fetch(at, KEY, RANK, SETUP_STEP, 5.0) == b"setup"
    assert fetch(at, KEY, RANK, 49, 5.0) == b"sidecar 49"
    with pytest.raises(SidecarLost, match="state of step 3 of rank 3 is lost"):
        fetch(at, KEY, RANK, 3, 5.0)


def test_segments_are_published_in_order() -> None:
    mine = publisher()
    mine.publish_segment(0, b"")
    for wrong in (0, 2):
        with pytest.raises(ValueError, match="but 1 is the next"):
            mine.publish_segment(wrong, b"")


def test_new_buddies_are_given_the_whole_tape_and_nobody_goes_on_before_they_have_it(keepers: list[Keeper]) -> None:
    mine = publisher()
    mine.connect(0, [keepers[0].address])
    mine.publish(SETUP_STEP, b"setup")
    for i, segment in enumerate(tape(3000, 1000)):
        mine.publish_segment(i, segment)
    for step in range(5):
        mine.publish(step, b"sidecar %d" % step)
    mine.connect(1, [keepers[1].address, keepers[2].address])
    mine.wait(20.0)
    for new in keepers[1:]:
        assert fetch_segments([new.address], KEY, RANK, 3000, 5.0, beside=4) == tape(3000, 1000)
        assert fetch([new.address], KEY, RANK, SETUP_STEP, 5.0) == b"setup"
        assert fetch([new.address], KEY, RANK, 3, 5.0) == b"sidecar 3"
    mine.publish_segment(3000, b"next")
    mine.wait(5.0)
    assert fetch_segments([keepers[2].address], KEY, RANK, 3001, 5.0)[3000] == b"next"


def test_a_newcomer_hands_on_the_tape_that_it_adopted(keepers: list[Keeper]) -> None:
    newcomer = publisher()
    newcomer.adopt(SETUP_STEP, b"setup")
    newcomer.adopt_segments(tape(7))
    newcomer.adopt(12, b"sidecar")
    newcomer.connect(1, [keepers[0].address])
    newcomer.publish_segment(7, b"eighth")
    newcomer.publish(13, b"later")
    newcomer.wait(5.0)
    at = [keepers[0].address]
    assert fetch_segments(at, KEY, RANK, 8, 5.0, beside=12) == [*tape(7), b"eighth"]
    assert fetch(at, KEY, RANK, 13, 5.0) == b"later"


def test_what_one_keeper_lacks_comes_from_the_next(keepers: list[Keeper]) -> None:
    for i, segment in enumerate(tape(10)):
        for keeper, has in zip(keepers, (i < 4, i != 6 and i != 2, i == 6), strict=True):
            if has:
                keeper.keep(segment_step(i), segment)
    gone = "127.0.0.1:1"
    addresses = [gone, *(keeper.address for keeper in keepers)]
    assert fetch_segments(addresses, KEY, RANK, 10, 5.0) == tape(10)
    with pytest.raises(SidecarLost, match=r"segment 6 of 10 of the tape of rank 3 is lost \(127.0.0.1:1: .*refused"):
        fetch_segments(addresses[:3], KEY, RANK, 10, 5.0)
    with pytest.raises(SidecarLost, match="no buddy is left"):
        fetch_segments([], KEY, RANK, 1, 5.0)
    assert fetch_segments([], KEY, RANK, 0, 5.0) == []


def test_a_keeper_that_breaks_off_is_followed_by_the_next(keepers: list[Keeper]) -> None:
    def half(listener: socket.socket) -> None:
        """Passes on a real keeper's answers until 5000 bytes of them, then the link breaks."""
        client, _ = listener.accept()
        host, _, port = keepers[0].address.rpartition(":")
        with client, socket.create_connection((host, int(port))) as server:
            client.sendall(server.recv(16))
            server.sendall(client.recv(33))
            server.sendall(client.recv(100))
            client.sendall(sidecars.receive_exactly(server, 5000))

    for keeper in keepers[:2]:
        for i, segment in enumerate(tape(100, 1000)):
            keeper.keep(segment_step(i), segment)
    with socket.create_server(("127.0.0.1", 0)) as front:
        threading.Thread(target=half, args=(front,), daemon=True).start()
        addresses = [f"127.0.0.1:{front.getsockname()[1]}", keepers[1].address]
        assert fetch_segments(addresses, KEY, RANK, 100, 5.0) == tape(100, 1000)
        addresses.pop()
        with pytest.raises(SidecarLost, match="segment 0"):
            fetch_segments(addresses, KEY, RANK, 100, 0.2)


def test_a_keeper_without_the_sidecar_is_not_asked_for_its_segments(keepers: list[Keeper]) -> None:
    """It was cut off before the rank moved: its tape goes on as the lost worker's did."""
    stale, current, _ = keepers
    for i in range(3):
        stale.keep(segment_step(i), b"lost worker's")
        current.keep(segment_step(i), b"newcomer's", generation=1)
    stale.keep(4, b"")
    current.keep(5, b"", generation=1)
    both = [stale.address, current.address]
    assert fetch_segments(both, KEY, RANK, 3, 5.0, beside=5) == [b"newcomer's"] * 3
    assert fetch_segments(both, KEY, RANK, 3, 5.0, beside=4) == [b"lost worker's"] * 3


def test_a_fenced_workers_late_segment_is_thrown_away(keepers: list[Keeper]) -> None:
    keepers[0].keep(segment_step(0), b"successor", generation=2)
    keepers[0].keep(segment_step(0), b"zombie", generation=1)
    keepers[0].keep(segment_step(1), b"zombie", generation=1)
    assert fetch_segments([keepers[0].address], KEY, RANK, 1, 5.0) == [b"successor"]
    with pytest.raises(SidecarLost, match="segment 1"):
        fetch_segments([keepers[0].address], KEY, RANK, 2, 5.0)


def test_the_covering_sidecar_is_the_newest_up_to_the_step_over_all_keepers(keepers: list[Keeper]) -> None:
    cut_off, whole, empty = keepers
    for step in (3, 5):
        cut_off.keep(step, b"%d" % step)
    for step in (5, 7, 9):
        whole.keep(step, b"%d" % step)
    whole.keep(SETUP_STEP, b"setup")
    whole.keep(segment_step(0), b"segment")
    addresses = [cut_off.address, empty.address, "127.0.0.1:1", whole.address]
    asked = {step: fetch_covering(addresses, KEY, RANK, step, 5.0) for step in range(3, 12)}
    assert list(asked.values()) == [b"3", b"3", b"5", b"5", b"7", b"7", b"9", b"9", b"9"]
    with pytest.raises(SidecarLost, match="state of step 2 of rank 3 is lost"):
        fetch_covering(addresses, KEY, RANK, 2, 5.0)
    with pytest.raises(SidecarLost, match="has none"):
        fetch_covering([whole.address], KEY, RANK, 4, 5.0)


def test_an_exact_sidecar_is_taken_without_asking_further(keepers: list[Keeper], mute: str) -> None:
    keepers[0].keep(5, b"five")
    assert fetch_covering([keepers[0].address, mute], KEY, RANK, 5, 60.0) == b"five"


def test_a_rank_that_recovers_again_is_covered_by_what_its_last_worker_wrote(keepers: list[Keeper]) -> None:
    for step in (6, 7, 8):
        keepers[0].keep(step, b"first %d" % step)
    newcomer = publisher()
    newcomer.adopt(6, b"first 6")
    newcomer.connect(1, [keepers[0].address])
    newcomer.publish(7, b"second 7")
    newcomer.wait(5.0)
    keepers[0].keep(7, b"zombie 7")
    assert fetch_covering([keepers[0].address], KEY, RANK, 7, 5.0) == b"second 7"


def test_ten_thousand_segments_come_in_about_a_second_and_cost_a_step_nothing(keepers: list[Keeper]) -> None:
    segments = tape(10_000, 8000)
    for i, segment in enumerate(segments):
        keepers[0].keep(segment_step(i), segment)
    at = [keepers[0].address]
    began = time.monotonic()
    assert fetch_segments(at, KEY, RANK, 10_000, 5.0) == segments
    assert time.monotonic() - began < 5.0  # 0.7 s on two cores
    many, few = publisher(), publisher()
    many.adopt_segments(segments)
    cost = {}
    for mine in (many, few):
        rounds = []
        for step in range(200):
            before = time.perf_counter()
            mine.publish(step, b"sidecar")
            rounds.append(time.perf_counter() - before)
        cost[mine] = sorted(rounds)[100]
    assert cost[many] < 5 * cost[few] + 1e-4


ASK: dict[str, Callable[[str, Callable[[], bool]], object]] = {
    "fetch": lambda address, stop: fetch([address], KEY, RANK, 5, 60.0, stop),
    "covering": lambda address, stop: fetch_covering([address], KEY, RANK, 5, 60.0, stop),
    "segments": lambda address, stop: fetch_segments([address], KEY, RANK, 1, 60.0, stop),
}


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("cut_after", [0, 16, 50_000], ids=["greeting", "question", "half the answer"])
def test_a_silent_keeper_holds_nobody_whose_recovery_was_given_up(
    ask: str, cut_after: int, keepers: list[Keeper]
) -> None:
    keepers[0].keep(5, b"x" * 100_000)
    keepers[0].keep(segment_step(0), b"x" * 100_000)
    with socket.create_server(("127.0.0.1", 0)) as front:
        threading.Thread(target=_pass, args=(front, keepers[0].address, cut_after), daemon=True).start()
        began = time.monotonic()
        with pytest.raises(Aborted, match="given up"):
            ASK[ask](f"127.0.0.1:{front.getsockname()[1]}", after(0.3).is_set)
        assert 0.2 < time.monotonic() - began < 20.0


def test_a_new_buddy_that_never_answers_holds_nobody_whose_recovery_was_given_up(mute: str) -> None:
    with pytest.raises(Aborted, match="given up"):
        Publisher(World(2).live().ranks[0].journal, KEY, RANK, 60.0).connect(1, [mute], after(0.3).is_set)


def test_a_cut_link_does_not_hold_a_rank_that_gives_a_new_buddy_its_tape(keepers: list[Keeper]) -> None:
    mine = Publisher(World(2).live().ranks[0].journal, KEY, RANK, 60.0)
    mine.adopt_segments(tape(4000, 8000))  # 32 MB: more than a connection's buffers take
    stop = after(0.5)
    with socket.create_server(("127.0.0.1", 0)) as front:
        threading.Thread(target=_pass, args=(front, keepers[0].address, 16), daemon=True).start()
        silent = f"127.0.0.1:{front.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(Aborted, match="given up"):
            mine.connect(1, [keepers[1].address, silent], stop.is_set)
        mine.connect(2, [keepers[1].address])
        mine.wait(20.0)
        assert time.monotonic() - began < 30.0
    assert fetch_segments([keepers[1].address], KEY, RANK, 4000, 5.0) == tape(4000, 8000)


def _pass(front: socket.socket, to: str, limit: int) -> None:
    """A link that carries everything to the server, and `limit` bytes back before it is cut."""
    client, _ = front.accept()
    host, _, port = to.rpartition(":")
    server = socket.create_connection((host, int(port)))
    sent = itertools.count()

    def forth() -> None:
        while data := client.recv(1000):
            if next(sent) < 10:
                server.sendall(data)
            else:
                time.sleep(60)

    threading.Thread(target=forth, daemon=True).start()
    while limit and (data := server.recv(limit)):
        client.sendall(data)
        limit -= len(data)
    time.sleep(60)

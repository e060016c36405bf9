"""The publisher against real sidecar servers, one of which may be behind a cut link."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.engine.test_journal import World
from tpwrap.control import sidecars
from tpwrap.engine.communicators import Aborted
from tpwrap.engine.sidecar import Publisher, fetch

KEY = b"k" * 32


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a buddy that completes the greeting and then never says a word: what a cut link looks like."""
    real = sidecars.SidecarServer(KEY)
    port = asyncio.run(real.start("127.0.0.1"))
    front = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                client, _ = front.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", port))
            held.extend((client, server))
            client.sendall(server.recv(1000))  # its challenge
            server.sendall(client.recv(1000))  # the answer; nothing afterwards

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{front.getsockname()[1]}"
    front.close()
    for one in held:
        one.close()
    real.close()


def test_a_buddy_behind_a_cut_link_holds_the_job_until_it_is_dropped(silent: str) -> None:
    world = World(2).live()
    live = sidecars.SidecarServer(KEY)
    address = f"127.0.0.1:{asyncio.run(live.start('127.0.0.1'))}"
    publisher = Publisher(world.ranks[0].journal, KEY, 0, 5.0)
    publisher.connect(0, [address, silent])
    publisher.publish(3, b"state")
    with pytest.raises(TimeoutError, match="did not acknowledge"):
        publisher.wait(0.2)
    publisher.drop(silent)
    publisher.wait(5.0)
    publisher.publish(4, b"later")  # the dropped one counts no more
    publisher.wait(5.0)
    assert fetch([address], KEY, 0, 4, 5.0) == b"later"
    publisher.drop("127.0.0.1:1")  # never a buddy: nothing happens
    live.close()


def test_a_recovery_that_is_given_up_waits_for_no_buddy(silent: str) -> None:
    """Behind a cut link a connection is neither made nor refused, and nothing is acknowledged."""
    publisher = Publisher(World(2).live().ranks[0].journal, KEY, 0, 60.0)
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    address = f"127.0.0.1:{full.getsockname()[1]}"
    waiting = [socket.socket() for _ in range(4)]  # what fills the queue of a server that accepts nobody
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(full.getsockname())
    given_up = threading.Event()
    threading.Timer(0.3, given_up.set).start()
    began = time.monotonic()
    with pytest.raises(Aborted, match="given up"):
        publisher.connect(1, [address], given_up.is_set)
    publisher.connect(2, [silent])
    publisher.publish(1, b"state")
    with pytest.raises(Aborted, match="given up"):
        publisher.wait(60.0, given_up.is_set)
    assert time.monotonic() - began < 30
    for one in (full, *waiting):
        one.close()

"""The sidecar server over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from tpwrap.control import sidecars
from tpwrap.control.sidecars import Put, SidecarServer

KEY = b"k" * 32


@pytest.fixture
def server() -> Iterator[tuple[SidecarServer, str]]:
    made = SidecarServer(KEY)
    port = asyncio.run(made.start("127.0.0.1"))
    yield made, f"127.0.0.1:{port}"
    made.close()


def put(address: str, *puts: Put) -> None:
    with sidecars.connect(address, KEY, b"P", 5.0) as connection:
        for one in puts:
            connection.sendall(one.frame())
            assert int.from_bytes(sidecars.receive_exactly(connection, 8), "little") == one.seq


def test_what_was_put_is_found_and_what_was_not_is_none(server: tuple[SidecarServer, str]) -> None:
    _, address = server
    put(address, Put(1, 3, 0, 7, b"seven"), Put(2, 3, 0, sidecars.SETUP_STEP, b""))
    assert sidecars.fetch(address, KEY, 3, 7, 5.0) == b"seven"
    assert sidecars.fetch(address, KEY, 3, sidecars.SETUP_STEP, 5.0) == b""
    assert sidecars.fetch(address, KEY, 3, 8, 5.0) is None
    assert sidecars.fetch(address, KEY, 4, 7, 5.0) is None


def test_the_newest_steps_are_kept_and_the_set_up_record_always(server: tuple[SidecarServer, str]) -> None:
    _, address = server
    steps = range(sidecars.KEPT + 5)
    put(address, Put(1, 0, 0, sidecars.SETUP_STEP, b"setup"), *(Put(2 + s, 0, 0, s, b"%d" % s) for s in steps))
    kept = [s for s in steps if sidecars.fetch(address, KEY, 0, s, 5.0) is not None]
    assert kept == list(steps)[-sidecars.KEPT :]
    assert sidecars.fetch(address, KEY, 0, sidecars.SETUP_STEP, 5.0) == b"setup"


def test_a_fenced_workers_late_blob_is_thrown_away(server: tuple[SidecarServer, str]) -> None:
    _, address = server
    put(address, Put(1, 0, 2, 5, b"successor"), Put(9, 0, 1, 5, b"zombie"))
    assert sidecars.fetch(address, KEY, 0, 5, 5.0) == b"successor"


@pytest.mark.parametrize("answer", [b"", b"x" * 33, b"P" * 200])
def test_without_the_key_the_connection_is_closed(server: tuple[SidecarServer, str], answer: bytes) -> None:
    _, address = server
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 5.0) as connection:
        sidecars.receive_exactly(connection, 16)
        with contextlib.suppress(OSError):  # closed already, with bytes unread
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(10) == b""
    with pytest.raises(ConnectionError):
        sidecars.fetch(address, b"wrong", 0, 0, 5.0)

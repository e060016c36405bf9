"""Find and cut the sockets of a gloo communicator.

gloo has no abort: `abort()`, `shutdown()`, time-out setters and destruction all leave a blocked operation blocked.
What works is `shutdown(2)` on its connections from another thread: gloo's own thread sees the end of the stream and
fails every pending operation within milliseconds. The descriptors stay open and gloo's; we only duplicate them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

_LISTEN = 1  # SO_ACCEPTCONN


def own_sockets() -> Iterator[socket.socket]:
    """A duplicate of every TCP socket of this process. The caller closes each."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
            yield duplicate
        else:
            duplicate.close()


Address = tuple[str, int]
"""host and port, as the kernel tells them"""


def listeners() -> set[Address]:
    """Addresses on which this process listens."""
    found = set()
    for sock in own_sockets():
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == _LISTEN:
                found.add(_address(sock.getsockname()))
    return found


def connections() -> set[tuple[Address, Address]]:
    """(local, remote) of every TCP connection of this process."""
    found = set()
    for sock in own_sockets():
        with sock, contextlib.suppress(OSError):
            found.add((_address(sock.getsockname()), _address(sock.getpeername())))
    return found


def cut(belongs: Callable[[Address, Address], bool]) -> int:
    """Shut down every TCP connection for which `belongs(local, remote)`; returns how many."""
    count = 0
    for sock in own_sockets():
        with sock, contextlib.suppress(OSError):  # not connected, or gone
            if belongs(_address(sock.getsockname()), _address(sock.getpeername())):
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _address(name: tuple[Any, ...]) -> Address:
    return str(name[0]), int(name[1])

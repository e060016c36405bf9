"""Find and cut the sockets of a gloo communicator.

gloo has no abort: `abort()`, `shutdown()`, time-out setters and destruction all leave a blocked operation blocked.
What works is `shutdown(2)` on its connections from another thread: gloo's own thread sees the end of the stream and
fails every pending operation within milliseconds. The descriptors stay open and gloo's; we only duplicate them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

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


def listening_ports() -> set[int]:
    """Ports on which this process listens."""
    ports = set()
    for sock in own_sockets():
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == _LISTEN:
                ports.add(int(sock.getsockname()[1]))
    return ports


def cut(belongs: Callable[[int, int], bool]) -> int:
    """Shut down every connected TCP socket for which `belongs(local port, remote port)`; returns how many."""
    count = 0
    for sock in own_sockets():
        with sock:
            try:
                local, remote = sock.getsockname()[1], sock.getpeername()[1]
                if belongs(local, remote):
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
            except OSError:
                continue  # not connected, or gone
    return count

"""The rendezvous store as a process of its own: `python -m tpwrap.control.store --host H`.

It hosts torch's TCPStore, so that no worker does: a store inside rank 0 would die with it. Prints one line
`PORT n` and lives until its standard input closes or its parent dies.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta

from tpwrap.core import signals

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tpwrap.control.store", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    options = parser.parse_args(arguments)
    # Standard input closes when the parent dies, too; the signal covers a parent whose pipe was inherited.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C goes to the whole foreground group, and Slurm signals every process of a job; the launcher decides when
    # the store ends.
    for number in signals.ALL:
        signal.signal(number, signal.SIG_IGN)

    from torch._C._distributed_c10d import TCPStore  # slow to import: after the death signal is armed

    family, _, _, _, address = socket.getaddrinfo(options.host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(4096)
    port = listener.getsockname()[1]
    # Handing over the listening socket is the only way to make TCPStore listen on one address alone.
    store = TCPStore(
        options.host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    print(f"PORT {port}", flush=True)
    while os.read(sys.stdin.fileno(), 4096):
        pass
    del store
    return 0


if __name__ == "__main__":
    sys.exit(main())

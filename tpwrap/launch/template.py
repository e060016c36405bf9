"""Forks everything of one launcher from one process that has imported torch, so that it is paid for once.

Started by the launcher as `template FD PARENT MODE [HOST STDIN STDOUT]`. It imports torch, forks the process
that holds the rendezvous store (on HOST; its standard input and output are the descriptors STDIN and STDOUT) if
this launcher is to have it, then reads one request on the socket FD, forks a supervisor a node, replies with their
pids and ends. All of them then are children of the launcher, the nearest subreaper.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from tpwrap.control import store, wire
from tpwrap.launch import processes, supervisor, zygote
from tpwrap.launch.node import NodeSpec


class TemplateRequest(msgspec.Struct, frozen=True):
    """Fork a supervisor for each of `nodes`."""

    nodes: list[NodeSpec]


class TemplateReply(msgspec.Struct, frozen=True):
    """pids of the supervisors, in the order of the request."""

    pids: list[int]


def main(arguments: Sequence[str]) -> int:
    """arguments: as above. MODE: 'preload', or 'bare' where workers are executed."""
    fd, parent, mode, *store_arguments = arguments
    processes.die_with_parent(int(parent))
    sock = socket.socket(fileno=int(fd))
    if mode == "preload":
        from tpwrap.engine import bootstrap

        bootstrap.preload()
    # Objects that live from here on would be copied, page by page, by collections in every descendant.
    gc.collect()
    gc.freeze()
    if store_arguments:
        host, *descriptors = store_arguments
        store_fds = [int(descriptor) for descriptor in descriptors]
        _fork(lambda: _become_store(sock, host, store_fds))
        for store_fd in store_fds:
            os.close(store_fd)
    request = wire.receive_blocking(sock, msgspec.msgpack.Decoder(TemplateRequest))
    if request is None:
        return 1

    def become(spec: NodeSpec) -> Callable[[], int]:
        return lambda: _become_supervisor(spec, sock)

    wire.send_blocking(sock, TemplateReply([_fork(become(spec)) for spec in request.nodes]))
    return 0


def _fork(child: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        zygote.run_forked(child)
    return pid


def _become_store(sock: socket.socket, host: str, fds: Sequence[int]) -> int:
    """Hold the store. It dies with its parent, and that shall be the launcher: so fork once more and wait
    until the process between is gone."""
    sock.close()
    between = os.getpid()
    if os.fork():
        return 0
    while os.getppid() == between:
        time.sleep(0.001)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    zygote.reset_signals()
    processes.set_name("tp-store")
    os.setsid()
    return store.main(["--host", host])


def _become_supervisor(spec: NodeSpec, sock: socket.socket) -> int:
    sock.close()
    os.setsid()
    zygote.reset_signals()
    zygote_pid, zygote_socket = zygote.fork_zygote(f"tp-zygote{spec.node}")
    processes.set_name(f"tp-node{spec.node}")
    return supervisor.run(spec, zygote_socket, zygote_pid)

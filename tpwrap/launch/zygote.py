"""The process that workers are forked from: it has imported torch once and does nothing but fork.

One zygote a node. It stays single-threaded (a fork of a threaded process can inherit held locks), so it is
not the supervisor itself. Workers are forked twice, so that they become children of the supervisor, which is
the nearest subreaper, and the zygote keeps no child to wait for.

Request and reply are frames of `tpwrap.control.wire`; one byte before a request carries the two descriptors
of the worker's output (SCM_RIGHTS). The zygote ends when the supervisor's end of the socket is closed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import msgspec

from tpwrap.control import wire
from tpwrap.core import signals
from tpwrap.launch import processes

_GO = b"F"
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Start a worker. python: arguments after `python` for a forked one; None: execute `argv`.

    cpus: the processors it may use; empty: those of the zygote.
    """

    argv: list[str]
    python: list[str] | None
    env: dict[str, str]
    cpus: list[int] = []


class Load(msgspec.Struct, frozen=True, tag=True):
    """Import these modules, so that all workers forked from now on have them."""

    modules: list[str]


class Reply(msgspec.Struct, frozen=True):
    """To `Spawn`: the worker's pid, or 0 and the problem. To `Load`: a problem if the zygote must not fork any more."""

    pid: int
    problem: str = ""


_request_decoder: msgspec.msgpack.Decoder[Spawn | Load] = msgspec.msgpack.Decoder(Spawn | Load)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


class ZygoteLost(Exception):
    """The zygote has ended."""


def request(sock: socket.socket, what: Spawn | Load, stdout: int, stderr: int) -> Reply:
    """Ask a zygote (blocking; called from a thread of the supervisor)."""
    try:
        socket.send_fds(sock, [_GO], [stdout, stderr])
        wire.send_blocking(sock, what)
    except OSError as e:
        raise ZygoteLost(str(e)) from None
    reply = wire.receive_blocking(sock, _reply_decoder)
    if reply is None:
        raise ZygoteLost("connection closed")
    return reply


def fork_zygote(name: str) -> tuple[int, socket.socket]:
    """Fork a zygote from this process, which must be single-threaded and preloaded.

    Returns its pid and our end of its socket.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        processes.set_name(name)
        run_forked(lambda: serve(theirs))
    theirs.close()
    return pid, ours


def serve(sock: socket.socket) -> int:
    """Fork workers on request until the other end closes. Returns the exit code."""
    # Ctrl-C, and what Slurm sends to every process of a job: the supervisor decides when this one ends.
    for number in signals.ALL:
        signal.signal(number, signal.SIG_IGN)
    while True:
        go, fds, _, _ = socket.recv_fds(sock, len(_GO), 2)
        asked = wire.receive_blocking(sock, _request_decoder) if go else None
        if asked is None:
            return 0
        if isinstance(asked, Load):
            reply = Reply(0, _load(asked.modules, fds))
        else:
            try:
                reply = Reply(_fork_twice(asked, fds, sock))
            except OSError as e:
                reply = Reply(0, f"cannot fork: {e.strerror}")
        for fd in fds:
            os.close(fd)
        try:
            wire.send_blocking(sock, reply)
        except OSError:
            return 0


def _load(modules: Sequence[str], fds: Sequence[int]) -> str:
    """Import `modules`; what they print goes to the output `fds`. Returns why this process must not fork any more, if
    so."""
    if not modules:
        return ""
    threads = _threads()
    with _output_to(fds):
        from tpwrap.engine import bootstrap

        bootstrap.load(modules)
    started = _threads() - threads
    if started > 0:
        return f"of the script's modules, some start threads ({started}), which a fork would not have"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "of the script's modules, one makes a CUDA context, which a fork could not use"
    # As in the template: what lives now is not to be copied by collections in every worker.
    gc.collect()
    gc.freeze()
    return ""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def _output_to(fds: Sequence[int]) -> Iterator[None]:
    saved = [os.dup(fd) for fd in (1, 2)]
    try:
        for target, fd in enumerate(fds, start=1):
            os.dup2(fd, target)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for target, fd in enumerate(saved, start=1):
            os.dup2(fd, target)
            os.close(fd)


def _fork_twice(spawn: Spawn, fds: list[int], sock: socket.socket) -> int:
    """Fork the worker from a child that ends at once; returns the worker's pid."""
    read_end, write_end = os.pipe()
    try:
        middle = os.fork()
        if middle == 0:
            try:
                worker = os.fork()
                if worker == 0:
                    os.close(read_end)
                    os.close(write_end)
                    sock.close()
                    run_forked(lambda: _become_worker(spawn, fds))
                os.write(write_end, str(worker).encode())
                os._exit(0)
            except OSError as e:
                os.write(write_end, f"-{e.errno or 11}".encode())
            finally:
                os._exit(1)
        os.close(write_end)
        write_end = -1
        text = os.read(read_end, 32)
        os.waitpid(middle, 0)
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
    if not text or text.startswith(b"-"):
        number = int(text[1:] or b"11")
        raise OSError(number, os.strerror(number))
    return int(text)


def run_forked(main: Callable[[], object]) -> NoReturn:
    """Run `main` in a forked child and never come back into the stack that was copied with it."""
    code = 1
    try:
        result = main()
        code = result if isinstance(result, int) else 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            pass
        os._exit(code)


def reset_signals() -> None:
    """Signal handling as in a fresh Python."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _become_worker(spawn: Spawn, fds: list[int]) -> None:
    devnull = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((devnull, 0), (fds[0], 1), (fds[1], 2)):
        os.dup2(source, target)
    for fd in (devnull, *fds):
        if fd > 2:
            os.close(fd)
    reset_signals()
    if spawn.cpus:
        os.sched_setaffinity(0, spawn.cpus)
    os.environ.clear()
    os.environ.update(spawn.env)
    processes.set_name(f"tp-{spawn.env.get('TORCHPASS_WORKER', 'worker')}")
    if spawn.python is None:
        _execute(spawn.argv)
    _fresh_streams()
    _own_randomness_and_threads()
    from tpwrap.engine import bootstrap

    bootstrap.run(spawn.python)


def _execute(argv: list[str]) -> NoReturn:
    # An ignored signal stays ignored across exec, where programs expect the default.
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as e:
        print(f"torchpass: cannot run {argv[0]}: {e.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(e, FileNotFoundError) else 126)


def _fresh_streams() -> None:
    """sys.stdin and its fellows over the new descriptors. Lines leave at once: a killed rank loses none."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdin = open(0, encoding=encoding, closefd=False)
    sys.stdout = open(1, "w", buffering=1, encoding=encoding, errors=errors, closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _own_randomness_and_threads() -> None:
    """What a fork must not share, in the libraries that are imported already."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdigit() and int(threads) > 0:
        # The variable is read when the library is loaded, and that was before it was set for this worker.
        torch.set_num_threads(int(threads))


def main(arguments: Sequence[str]) -> int:
    """arguments: FD MODE NAME (see the template). A zygote of its own: there is no template, or its fork died."""
    fd, mode, name = arguments
    processes.set_name(name)
    processes.die_with_parent(os.getppid())
    if mode == "preload":
        from tpwrap.engine import bootstrap

        bootstrap.preload()
    return serve(socket.socket(fileno=int(fd)))

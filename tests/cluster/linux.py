"""The few system calls that Python 3.10 lacks."""

import ctypes
import os
import signal

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
NAMESPACES = ("mnt", "net", "uts", "ipc", "pid")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def unshare(flags: int) -> None:
    """New namespaces for this process; of NEWPID only its children are members."""
    _call("unshare", _libc.unshare(ctypes.c_int(flags)))


def enter(pid: int) -> None:
    """Join all namespaces of process `pid`; its PID namespace only for children made from now on."""
    handles = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    for name, handle in zip(NAMESPACES, handles, strict=True):
        _call(f"setns {name} of {pid}", _libc.setns(ctypes.c_int(handle), ctypes.c_int(0)))
        os.close(handle)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    def text(value: str | None) -> ctypes.c_char_p:
        return ctypes.c_char_p(value.encode() if value is not None else None)

    result = _libc.mount(text(source), text(target), text(kind), ctypes.c_ulong(flags), text(options))
    _call(f"mount {source} on {target}", result)


def die_with_parent() -> None:
    """SIGKILL for this process as soon as the thread that made it ends. A change of user forgets it: call it after."""
    _call("prctl", _libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0))

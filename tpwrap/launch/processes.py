"""What Linux knows about processes, and the few things that only it can do for us."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends. `parent`: its pid, to see whether it is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def set_name(name: str) -> None:
    """What `top` and `ps -o comm` show (15 bytes of it): forks of one process look alike otherwise."""
    text = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(text))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (0: state, 1: parent); empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            text = f.read()
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The name before it stands in parentheses and may hold anything.
    return text[text.rindex(b")") + 2 :].decode().split()


def state(pid: int) -> str:
    """One letter as in ps: R S D T t Z …; "" if there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def variable(pid: int, name: str) -> str:
    """An environment variable as the process found it when it was executed; "" if it has none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            entries = f.read().split(b"\0")
    except OSError:
        return ""
    start = name.encode() + b"="
    return next((os.fsdecode(e.removeprefix(start)) for e in entries if e.startswith(start)), "")


def children(pid: int) -> list[int]:
    """Direct children of `pid`, zombies included."""
    return _by_parent().get(pid, [])


def family(root: int) -> list[int]:
    """All descendants of `root`, parents first, without `root`. A snapshot: they may fork meanwhile."""
    by_parent = _by_parent()
    found = [root]
    for pid in found:
        found.extend(by_parent.get(pid, []))
    return found[1:]


def _by_parent() -> dict[int, list[int]]:
    by_parent: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            by_parent.setdefault(int(fields[1]), []).append(int(name))
    return by_parent


def send_signal(pid: int, number: int) -> bool:
    """Signal a process; False if it has ended. Only for pids that this process has not reaped yet."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_group(group: int) -> bool:
    """SIGKILL for a whole process group; False if nothing of it is left."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def kill_family(root: int) -> int:
    """SIGKILL for all descendants of `root`, until a look finds none alive; how many were killed.

    Those that are nobody's own child any more only vanish when `root` (a subreaper) reaps them.
    """
    killed = 0
    for _ in range(100):
        alive = [pid for pid in family(root) if state(pid) not in ("Z", "X", "")]
        if not alive:
            break
        for pid in alive:
            killed += send_signal(pid, signal.SIGKILL)
        os.sched_yield()
    return killed

"""The file system that the daemons and users of a bed see: an overlay of a Slurm version's root, never written through.

Everything here runs in a mount namespace of the bed. The calling process keeps the host's view; the bed's view lies
at `root`, into which daemons and commands chroot. As a script it runs one command there: BASE MOUNTPOINT EXPOSED CWD
COMMAND...
"""

import json
import os
import stat
import sys
from typing import NoReturn

import linux
from linux import MS_BIND, MS_PRIVATE, MS_REC, mount

PRIVATE = {"/tmp": 0o1777, "/var/tmp": 0o1777, "/run": 0o755, "/dev/shm": 0o1777}  # every node has its own


def make_private() -> None:
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def build(root: str, base: str, exposed: list[str]) -> None:
    """Lay `root` over `base`; what is written there is kept in memory and goes with the mount namespace."""
    mount("tmpfs", root, "tmpfs")
    layers = {name: f"{root}/{name}" for name in ("upper", "work", "merged")}
    for path in layers.values():
        os.mkdir(path)
    os.chmod(layers["upper"], 0o755)
    options = f"lowerdir={base},upperdir={layers['upper']},workdir={layers['work']}"
    mount("overlay", layers["merged"], "overlay", options=options)
    mount(layers["merged"], root, flags=MS_BIND)
    mount("/dev", f"{root}/dev", flags=MS_BIND | MS_REC)
    for path in sorted(exposed):
        if not _private(path):
            expose(root, path)


def furnish(root: str, exposed: list[str]) -> None:
    """What each node (and the controller) has of its own: /proc, /sys and the PRIVATE folders."""
    mount("proc", f"{root}/proc", "proc")
    mount("sysfs", f"{root}/sys", "sysfs")  # of this network namespace; and no cgroups, so none can be left behind
    for path, mode in PRIVATE.items():
        mount("tmpfs", root + path, "tmpfs", options=f"mode={mode:o}")
    for path in sorted(exposed):
        if _private(path):
            expose(root, path)


def _private(path: str) -> bool:
    return any(path.startswith(f"{folder}/") for folder in PRIVATE)


def expose(root: str, path: str) -> None:
    """Show the host's `path` at the same place in `root`, reachable for everybody.

    Where an ancestor is closed to others (such as /root), an empty open folder covers it and only `path` shows.
    """
    parts = path.strip("/").split("/")
    for depth in range(1, len(parts)):
        ancestor = root + "/" + "/".join(parts[:depth])
        os.makedirs(ancestor, exist_ok=True)
        if not os.stat(ancestor).st_mode & stat.S_IXOTH:
            mount("tmpfs", ancestor, "tmpfs", options="mode=755")
    bind(path, root + path)


def bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        if os.path.islink(target):
            os.unlink(target)  # a mount would land where it points to, on the host
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            open(target, "x").close()
    mount(source, target, flags=MS_BIND | MS_REC)


def run(base: str, mountpoint: str, exposed: list[str], cwd: str, argv: list[str]) -> NoReturn:
    """Become a command in `base`, without a bed."""
    linux.unshare(linux.NEWNS)
    make_private()
    build(mountpoint, base, exposed)
    furnish(mountpoint, exposed)
    os.chroot(mountpoint)
    os.chdir(cwd)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    _, base, mountpoint, exposed, cwd, *argv = sys.argv
    run(base, mountpoint, json.loads(exposed), cwd, argv)

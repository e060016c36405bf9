"""Run a command inside a bed: `enter.py WORLD NODE ROOT UID CWD COMMAND...`

WORLD is the host's pid of the world, NODE the pid of a node's pid 1 in the world's PID namespace, or 0 for the
controller. This process stays outside as the command's stand-in: signals go through, and when it is killed, so is the
command.
"""

import fcntl
import os
import signal
import sys
import termios
from typing import NoReturn

import linux

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def become(uid: int, cwd: str, argv: list[str]) -> NoReturn:
    try:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if os.isatty(0):  # a session of its own, so that a shell has job control: process groups outside are unknown
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 1)
        os.setgroups([uid])
        os.setgid(uid)
        os.setuid(uid)
        os.chdir(cwd)
        linux.die_with_parent()
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def main(world: int, node: int, root: str, uid: int, cwd: str, argv: list[str]) -> NoReturn:
    linux.enter(world)
    if node:
        linux.enter(node)
    os.chroot(root)
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # none is lost before the handler is there
    child = os.fork()
    if child == 0:
        become(uid, cwd, argv)
    for number in FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os.closerange(0, 3)  # the command alone holds them: a reader sees the end when it ends
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _, world, node, root, uid, cwd, *argv = sys.argv
    main(int(world), int(node), root, int(uid), cwd, argv)

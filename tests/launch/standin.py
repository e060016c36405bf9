"""A worker without the engine: speaks the protocol of `tpwrap.control.messages`, then does what it is told.

Run as: env PYTHONPATH= python standin.py ACTION [ARGUMENT]. ACTION (what the first incarnation does as a rank):
finish | exit CODE | signal NUMBER | wait | children | raise
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import msgspec

from tpwrap.control import messages as m
from tpwrap.control import wire


def main() -> None:
    action, argument = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.environ["TORCHPASS_SOCKET"])
    decoder = msgspec.msgpack.Decoder(m.CoordinatorToWorker)
    wire.send_blocking(sock, os.environ["TORCHPASS_WORKER"])
    wire.send_blocking(sock, m.WarmReady(os.getpid(), "127.0.0.1:1"))
    generation, assigned = 0, None
    while (message := wire.receive_blocking(sock, decoder)) is not None:
        if isinstance(message, m.Assign):
            assigned, generation = message, message.generation
            print(f"rank {message.rank} pid {os.getpid()} incarnation {message.incarnation}", flush=True)
            wire.send_blocking(sock, m.SetupDone(generation, []))
            if message.plan is not None and message.plan.step >= 0:
                wire.send_blocking(sock, m.Ready(generation, 1, "d", "", {}))
        elif isinstance(message, m.Release):
            generation = message.generation
            wire.send_blocking(sock, m.Released(generation, 1, 0.0))
        elif isinstance(message, m.Plan):
            generation = message.generation
            wire.send_blocking(sock, m.Ready(generation, 1, "d", "", {}))
        elif isinstance(message, m.Resume):
            if assigned is not None and message.generation > 0:
                wire.send_blocking(sock, m.Resumed(message.generation, {}, 0))
        elif isinstance(message, m.Bye):
            sys.exit(0)
        if assigned is not None and isinstance(message, m.Assign | m.Resume):
            act(sock, action, argument, assigned)
    sys.exit(3)


def act(sock: socket.socket, action: str, argument: str, assigned: m.Assign) -> None:
    if assigned.incarnation > 0 or assigned.rank != 0 or action == "finish":
        if action != "wait":
            wire.send_blocking(sock, m.Finished(1))
        return
    wire.send_blocking(sock, m.Progress(1))
    if action == "children":
        for _ in range(2):
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("children started", flush=True)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "exit":
        os._exit(int(argument))
    elif action == "signal":
        time.sleep(0.2)
        os.kill(os.getpid(), int(argument))
    elif action == "raise":
        wire.send_blocking(sock, m.Failed(1, "ValueError: boom", "Traceback: boom\nValueError: boom\n", 1))
        os._exit(1)


main()

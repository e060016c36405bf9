"""The worker's end of the socket to its supervisor."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tpwrap.control import wire
from tpwrap.control.messages import Bye

WORKER = """
import sys, time
from tpwrap.engine.link import Link
Link(sys.argv[1], "w").start(lambda message: 1 / 0)
time.sleep(60)
"""


def test_a_worker_that_cannot_handle_a_message_ends(tmp_path: Path) -> None:
    """Deaf, it would train on, and hold up all others at the next failure."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        worker = subprocess.Popen([sys.executable, "-c", WORKER, path], stderr=subprocess.PIPE)
        connection, _ = server.accept()
        with connection:
            wire.send_blocking(connection, Bye())
            _, errors = worker.communicate(timeout=30)
    assert worker.returncode == 70
    assert b"ZeroDivisionError" in errors

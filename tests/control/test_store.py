from __future__ import annotations

import subprocess
import sys
from datetime import timedelta


def test_the_store_serves_and_ends_with_its_standard_input() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tpwrap.control.store", "--host", "127.0.0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        word, port = process.stdout.readline().split()
        assert word == "PORT"
        from torch._C._distributed_c10d import TCPStore

        client = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=20))
        client.set("k", "v")
        assert client.get("k") == b"v"
        process.stdin.close()
        assert process.wait(20) == 0

"""A worker without the engine: speaks the protocol of `tpwrap.control.messages`, then does as it is told.

Run as `env PYTHONPATH=… python standin.py ACTION [ARGUMENT]`, so that the real engine stays out. ACTION is
what the first incarnation of rank 0 does; once it is replaced, all ranks finish:
finish | exit CODE | signal NUMBER | raise | children | wait (all ranks, for ever)
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from tpwrap.control import messages as m
from tpwrap.control import wire

STEP = 1


class StandIn:
    def __init__(self, action: str, argument: str) -> None:
        self.action = action
        self.argument = argument
        self.assigned: m.Assign | None = None
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["TORCHPASS_SOCKET"])

    def send(self, message: object) -> None:
        wire.send_blocking(self.sock, message)

    def run(self) -> int:
        self.send(os.environ["TORCHPASS_WORKER"])
        self.send(m.WarmReady(os.getpid(), "127.0.0.1:1"))
        decoder: msgspec.msgpack.Decoder[m.CoordinatorToWorker] = msgspec.msgpack.Decoder(m.CoordinatorToWorker)
        while (message := wire.receive_blocking(self.sock, decoder)) is not None:
            if isinstance(message, m.Bye):
                return 0
            self.answer(message)
        return 3

    def answer(self, message: m.CoordinatorToWorker) -> None:
        match message:
            case m.Assign(generation=generation, rank=rank, plan=plan):
                self.assigned = message
                Path(os.environ["TORCHPASS_RUN_DIR"], f"came{rank}").touch()
                print(f"rank {rank} pid {os.getpid()} incarnation {message.incarnation}", flush=True)
                if plan is None or plan.step < 0:
                    self.send(m.SetupDone(generation, []))
                    self.train(generation)
                else:
                    self.send(m.Ready(generation, plan.step, "d", "", {}))
            case m.Release(generation):
                self.send(m.Released(generation, STEP, 0.0))
            case m.Plan(generation, step):
                self.send(m.Ready(generation, step, "d", "", {}))
            case m.Resume(generation) if generation > 0:
                self.send(m.Resumed(generation, {}, 0))
                self.train(generation)

    def train(self, generation: int) -> None:
        """Until something fails in generation 0 (or nothing is to fail), and then to the end."""
        assert self.assigned is not None
        self.send(m.Progress(STEP))
        if self.action == "finish" or (generation > 0 and self.action != "wait"):
            self.send(m.Finished(STEP))
        elif self.assigned.rank == 0 and self.action != "wait":
            self.fail()

    def fail(self) -> None:
        assert self.assigned is not None
        # As init_process_group would: nobody fails alone before the others have come.
        run_dir = Path(os.environ["TORCHPASS_RUN_DIR"])
        while len(list(run_dir.glob("came*"))) < self.assigned.world_size:
            time.sleep(0.01)
        match self.action:
            case "exit":
                os._exit(int(self.argument))
            case "signal":
                os.kill(os.getpid(), int(self.argument))
            case "raise":
                self.send(m.Failed(STEP, "ValueError: boom", "Traceback: boom\nValueError: boom\n", 1))
                os._exit(1)
            case "children":
                for _ in range(2):
                    subprocess.Popen(["sleep", "600"], start_new_session=True)
                print("children started", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(StandIn(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "").run())

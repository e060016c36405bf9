"""Fire injected faults where the engine passes by. What a fault is: `tpwrap.core.faults`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from tpwrap.control.messages import InjectAck, Injecting, WorkerMessage
from tpwrap.core import faults
from tpwrap.engine import _native

_ANSWER_SECONDS = 30.0

_IN_COLLECTIVE = {
    "kill": _native.Fault.KILL,
    "stop": _native.Fault.STOP,
    "exit": _native.Fault.EXIT,
    "exception": _native.Fault.EXCEPTION,
    "drop": _native.Fault.DROP,
}


class InjectedError(RuntimeError):
    """What the action `exception` raises in the user's script."""


class Injector:
    """Holds the faults of this rank that have not fired. `announce` makes each fire once in the life of the job: it
    asks the coordinator and waits for the answer."""

    def __init__(self, specs: list[tuple[int, str]], send: Callable[[WorkerMessage], None]) -> None:
        self._faults = [(number, faults.parse(text)) for number, text in specs]
        self._send = send
        self._answers: dict[int, bool] = {}
        self._answered = threading.Condition()

    def wants(self, phase: str) -> bool:
        return any(fault.phase == phase for _, fault in self._faults)

    def step_begins(self, step: int, journal: _native.Journal) -> None:
        """Arm a fault that fires at a collective: it is announced now, since C++ fires it on the spot."""
        for number, fault in list(self._faults):
            if fault.phase == "collective" and fault.step == step and fault.n is not None and self._take(number):
                action = _IN_COLLECTIVE[fault.action]
                if fault.target == "node" and fault.action == "kill":
                    action = _native.Fault.KILL_NODE
                journal.arm(step, fault.n, action)

    def at(self, phase: str, step: int, stage: str | None = None) -> None:
        """Fire what is due here."""
        for number, fault in list(self._faults):
            if fault.phase == phase and fault.stage == stage and fault.step in (None, step) and self._take(number):
                self._act(fault)

    def answer(self, ack: InjectAck) -> None:
        with self._answered:
            self._answers[ack.fault] = ack.fire
            self._answered.notify_all()

    def _take(self, number: int) -> bool:
        self._faults = [(n, fault) for n, fault in self._faults if n != number]
        self._send(Injecting(number))
        with self._answered:
            self._answered.wait_for(lambda: number in self._answers, _ANSWER_SECONDS)
            return self._answers.get(number, False)

    def _act(self, fault: faults.Fault) -> None:
        if fault.action == "kill":
            if fault.target == "node":
                os.killpg(0, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            if fault.target == "node":
                os.killpg(0, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "exit":
            sys.stdout.flush()
            os._exit(3)
        elif fault.action == "exception":
            raise InjectedError(f"injected: {fault}")

"""Where this rank is: in which collectives it waits, which it has joined, and the line of the script."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch

import tpwrap
from tpwrap.control.messages import Waiting, Whereabouts
from tpwrap.engine.communicators import Communicator, Communicators

_OURS = tuple(os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in (torch, tpwrap))
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


class Lookout:
    """Looks when it is asked; costs nothing before."""

    def __init__(self, communicators: Communicators, world_size: int) -> None:
        self._communicators = communicators
        self._world_size = world_size
        self._unconnected: dict[int, float] = {}
        """since when a group, by its index, has been seen to have no connections"""

    def look(self, generation: int, step: int) -> Whereabouts:
        everyone = list(self._communicators.all)
        return Whereabouts(
            generation,
            step,
            waits=[wait for one in everyone for wait in self._waits(one, step)],
            joined={_key(one): one.backend.joined() for one in everyone},
            line=_line_of_the_script(),
        )

    def _waits(self, one: Communicator, step: int) -> Iterator[Waiting]:
        everyone = one.group.size == self._world_size
        operation, at, number, seconds = one.backend.oldest_wait()
        if one.generation < 0 and not operation:
            since = self._unconnected.setdefault(one.index, time.monotonic())
            yield Waiting(_key(one), "the set-up of a process group", step, -1, time.monotonic() - since, everyone)
            return
        self._unconnected.pop(one.index, None)
        if operation:
            yield Waiting(_key(one), operation.strip("_").lower(), at, number, seconds, everyone)


def _key(one: Communicator) -> str:
    return f"{one.name}#{one.occasion}/{one.device.type}"


def _line_of_the_script() -> str:
    """The innermost line that the main thread runs of the user's own code."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = os.path.abspath(frame.f_code.co_filename)
        standard = file.startswith(_STANDARD) and "site-packages" not in file
        if not (file.startswith(_OURS) or standard or frame.f_code.co_filename.startswith("<")):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

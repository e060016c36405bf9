"""The coordinator: carries what happens to `core.membership` and carries out what it decides.

One process per job, never inside a worker. It decides nothing itself and waits for nobody: a peer that does
not read is silent, and silence has its deadline in membership.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from tpwrap.control import messages as m
from tpwrap.control import wire
from tpwrap.core import events, membership
from tpwrap.core.arrangement import Site
from tpwrap.core.job import Job
from tpwrap.core.state import (
    Action,
    Emit,
    End,
    Exited,
    FenceNode,
    Heard,
    Joined,
    KillWorker,
    Left,
    NodeLost,
    Observation,
    Said,
    Send,
    SlotBroken,
    Stop,
    StoreLost,
    Tick,
)

log = logging.getLogger(__name__)

SupervisorChannel: TypeAlias = wire.Channel[m.SupervisorMessage]


@dataclass(frozen=True)
class Verdict:
    """How the job ended."""

    exit_code: int
    reason: str
    traceback: str


class Coordinator:
    """Decides for one job.

        coordinator = Coordinator(job, key, "127.0.0.1:29500", run_dir, on_event=show)
        port = await coordinator.start("127.0.0.1")   # supervisors connect here
        verdict = await coordinator.run()             # until the job has ended and the supervisors have left

    `on_event` is called in the event loop for each event, after it was written to run_dir/events.jsonl; an
    exception from it is logged and ignored. `supervisor_died`, `store_lost` and `stop` are to be called in the
    event loop.
    """

    def __init__(
        self,
        job: Job,
        key: bytes,
        store_address: str,
        run_dir: Path,
        on_event: Callable[[events.Event], None] | None = None,
        *,
        run_id: str | None = None,
    ) -> None:
        self._job = job
        self._key = key
        self._on_event = on_event
        self._run_id = run_id or run_dir.name or "tpwrap"
        self._file = (run_dir / "events.jsonl").open("ab", buffering=0)
        self._state = membership.initial(job, store_address, self._run_id, time.monotonic())
        self._times = self._state.times
        self._channels: dict[int, SupervisorChannel] = {}
        self._inbox: deque[Observation] = deque()
        self._busy = False
        self._verdict: Verdict | None = None
        self._ended = asyncio.Event()
        self._leaving: set[str] = set()
        """workers that hold a rank at the end and have not exited yet"""
        self._change = asyncio.Event()
        """set whenever a worker exits or a supervisor leaves after the end"""
        self._server: asyncio.Server | None = None
        self._decoder: msgspec.msgpack.Decoder[m.SupervisorMessage] = msgspec.msgpack.Decoder(
            m.SupervisorMessage
        )

    async def start(self, host: str, ports: Sequence[int] = (0,)) -> int:
        """Listen for supervisors on the first of `ports` that is free (0: any); returns the port."""
        for port in ports:
            try:
                self._server = await wire.serve(host, port, self._key, self._decoder, self._supervise)
                break
            except OSError:
                if port == ports[-1]:
                    raise
        job = self._job
        self._emit(
            events.JobStarted(
                pid=os.getpid(),
                run_id=self._run_id,
                nodes=job.nodes,
                nproc_per_node=job.nproc_per_node,
                spares=job.spares,
                unit=job.unit,
                failure_timeout=job.failure_timeout,
                store=self._state.store,
                faults=[str(fault) for fault in job.faults],
            )
        )
        assert self._server is not None
        listening: int = self._server.sockets[0].getsockname()[1]
        return listening

    async def run(self) -> Verdict:
        """Until the job has ended, its workers have exited and its supervisors have left."""
        assert self._server is not None, "call start() first"
        clock = asyncio.create_task(self._clock())
        try:
            await self._ended.wait()
            assert self._verdict is not None
            await self._see_off(self._verdict)
        finally:
            clock.cancel()
            self._server.close()
            for channel in self._channels.values():
                channel.abort()
            self._file.close()
        return self._verdict

    def supervisor_died(self, node: int, how: str) -> None:
        """A second observer (the parent process) saw the supervisor end: no need to wait for silence."""
        self._observe(NodeLost(node, how))

    def store_lost(self) -> None:
        """The rendezvous store has ended: the next failure ends the job, at once and with that reason."""
        self._observe(StoreLost())

    def stop(self, signal_name: str) -> None:
        """End the job because of SIGINT or SIGTERM."""
        self._observe(Stop(signal_name))

    @property
    def generation(self) -> int:
        return self._state.generation

    # --- peers --------------------------------------------------------------------------------------

    async def _supervise(self, channel: SupervisorChannel) -> None:
        try:
            hello = await asyncio.wait_for(channel.receive(), self._times.handshake)
        except asyncio.TimeoutError:
            channel.abort()
            return
        if not isinstance(hello, m.Hello):
            return
        why_not = membership.refusal(self._state, hello.node, hello.slots, hello.protocol)
        if why_not is not None:
            log.error("supervisor of node %d (pid %d) is refused: %s", hello.node, hello.pid, why_not)
            self._emit(events.Notice("error", f"supervisor of node {hello.node} is refused: {why_not}"))
            channel.post(m.Shutdown(f"refused: {why_not}"))
            return
        node = hello.node
        self._channels[node] = channel
        site = Site(hello.block, hello.vital, hello.sick)
        self._observe(Joined(node, hello.host, hello.pid, hello.slots, hello.sidecars, hello.name, site))
        while (message := await channel.receive()) is not None:
            self._observe(_understood(node, message))
        if self._channels.get(node) is channel:
            del self._channels[node]
        self._change.set()
        self._observe(NodeLost(node, channel.why_closed))

    async def _clock(self) -> None:
        beat = 0.0
        while True:
            await asyncio.sleep(self._times.tick)
            now = time.monotonic()
            if now - beat >= self._times.heartbeat:
                beat = now
                for channel in self._channels.values():
                    channel.post(m.Heartbeat())
            self._observe(Tick())

    # --- membership -----------------------------------------------------------------------------------

    def _observe(self, observation: Observation) -> None:
        """Decide, and act. What acting brings about is decided next, not in the middle."""
        self._inbox.append(observation)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._step(self._inbox.popleft())
        finally:
            self._busy = False

    def _step(self, observation: Observation) -> None:
        if self._state.ended:
            if isinstance(observation, Exited):
                self._leaving.discard(observation.worker)
                self._change.set()
            return
        try:
            result = membership.transition(self._state, observation, time.monotonic())
        except Exception as error:  # a bug of ours must end the job, not leave it hanging
            log.exception("internal error while deciding on %r", observation)
            reason = f"internal error: {type(error).__name__}: {error}"
            self._emit(events.JobEnded(70, reason, "", 0, self._state.failovers))
            self._finish(End(70, reason))
            self._inbox.clear()
            return
        self._state = result.state
        for reason in result.reasons:
            log.info("%s", reason)
        for action in result.actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Send(node, worker, message):
                self._post(node, m.ToWorker(worker, message))
            case KillWorker(node, worker):
                self._post(node, m.Kill(worker))
            case FenceNode(node, reason):
                channel = self._channels.pop(node, None)
                if channel is not None:
                    channel.post(m.Shutdown(f"this node was given up: {reason}"))
                    channel.close()
                    # If it does not even read that: what is queued is dropped in the end.
                    asyncio.get_running_loop().call_later(self._times.stop_grace, channel.abort)
            case Emit(event):
                self._emit(event)
            case End():
                self._finish(action)

    def _post(self, node: int, message: m.CoordinatorMessage) -> None:
        channel = self._channels.get(node)
        if channel is not None:
            channel.post(message)

    def _finish(self, end: End) -> None:
        if self._verdict is None:
            self._verdict = Verdict(end.exit_code, end.reason, end.traceback)
            self._leaving = {rank.worker for rank in self._state.ranks.values() if rank.worker is not None}
            self._ended.set()

    async def _see_off(self, verdict: Verdict) -> None:
        """Workers that finished leave on their own (Bye); then the supervisors end whatever is left."""
        if verdict.exit_code == 0:
            await self._wait_until(lambda: not self._leaving, self._times.stop_grace)
        for channel in self._channels.values():
            channel.post(m.Shutdown(verdict.reason, verdict.exit_code))
        # A supervisor needs one grace of its own between SIGTERM and SIGKILL.
        await self._wait_until(lambda: not self._channels, 2 * self._times.stop_grace + 1)

    async def _wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            self._change.clear()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            try:
                await asyncio.wait_for(self._change.wait(), left)
            except asyncio.TimeoutError:
                return

    # --- events ---------------------------------------------------------------------------------------

    def _emit(self, event: events.Event) -> None:
        if not self._file.closed:
            self._file.write(events.to_line(event, time.time()))
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                log.exception("on_event failed for %r", event)


def _understood(node: int, message: m.SupervisorMessage) -> Observation:
    match message:
        case m.FromWorker(slot, worker, said):
            return Said(node, slot, worker, said)
        case m.WorkerExited(_, worker, returncode, hung):
            return Exited(node, worker, returncode, hung)
        case m.SlotFailed(slot, how, returncode):
            return SlotBroken(node, slot, how, returncode)
        case m.Leaving(signal):
            return Left(node, signal)
        case _:
            return Heard(node)

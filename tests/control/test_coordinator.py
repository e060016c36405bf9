"""The coordinator over real sockets; the supervisors are played here, over the real wire protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from tpwrap.control import messages as m
from tpwrap.control import wire
from tpwrap.control.coordinator import Coordinator, Verdict
from tpwrap.core import events, faults
from tpwrap.core.job import Job

KEY = b"k" * 32
DECODER: msgspec.msgpack.Decoder[m.CoordinatorMessage] = msgspec.msgpack.Decoder(m.CoordinatorMessage)


class Supervisor:
    """One node with one slot: workers answer as the engine does, at once and without training anything."""

    def __init__(self, node: int, port: int) -> None:
        self.node = node
        self.port = port
        self.step = 0
        self.digest = "d"
        self.count = 0
        self.active = ""
        self.got: list[m.CoordinatorToWorker] = []
        self.kills: list[str] = []
        self.farewell: str | None = None
        self.changed = asyncio.Event()
        self.channel: wire.Channel[m.CoordinatorMessage]

    async def connect(self, protocol: int = m.PROTOCOL) -> None:
        self.channel = await wire.Channel.connect("127.0.0.1", self.port, KEY, DECODER)
        hello = m.Hello(protocol, self.node, "localhost", 1000 + self.node, 1, f"127.0.0.1:90{self.node}0")
        await self.channel.send(hello)
        self.reading = asyncio.create_task(self.read())

    async def read(self) -> None:
        while (message := await self.channel.receive()) is not None:
            match message:
                case m.ToWorker(worker, inner):
                    self.got.append(inner)
                    self.answer(worker, inner)
                case m.Kill(worker):
                    self.kills.append(worker)
                case m.Shutdown(reason):
                    self.farewell = reason
                    self.channel.close()
            self.changed.set()

    def warm(self) -> None:
        name = f"n{self.node}s0w{self.count}"
        self.count += 1
        self.say(m.WarmReady(5000 + self.count, f"127.0.0.1:7{self.node}{self.count:02d}"), name)

    def say(self, message: m.WorkerMessage, worker: str = "") -> None:
        self.channel.post(m.FromWorker(0, worker or self.active, message))

    def exit(self, returncode: int) -> None:
        self.channel.post(m.WorkerExited(0, self.active, returncode))

    def answer(self, worker: str, message: m.CoordinatorToWorker) -> None:
        match message:
            case m.Assign(generation, plan=plan):
                self.active = worker
                if plan is not None and plan.step >= 0:
                    self.say(m.Ready(generation, plan.step, self.digest, "L", {"copy": 0.25}))
            case m.Release(generation) if worker == self.active:
                self.say(m.Released(generation, self.step, 0.001))
            case m.Plan(generation) if message.step >= 0:
                self.say(m.Ready(generation, self.step, self.digest, "L", {"rebuild": 0.5}))
            case m.Resume(generation):
                self.say(m.Resumed(generation, {"replay": 0.125}, 3))
            case m.Explain(step):
                self.say(m.Tensors(step, {"model/w": self.digest, "model/b": "equal"}))
            case m.Bye():
                self.exit(0)

    async def until(self, kind: type[m.CoordinatorToWorker]) -> m.CoordinatorToWorker:
        while True:
            for one in self.got:
                if isinstance(one, kind):
                    return one
            self.changed.clear()
            await self.changed.wait()


class Rig:
    def __init__(self, coordinator: Coordinator, port: int, seen: list[events.Event]) -> None:
        self.coordinator = coordinator
        self.port = port
        self.events = seen
        self.running = asyncio.create_task(coordinator.run())
        self.nodes: list[Supervisor] = []

    async def up(self, count: int) -> None:
        for node in range(count):
            one = Supervisor(node, self.port)
            await one.connect()
            self.nodes.append(one)
        for one in self.nodes:
            one.warm()

    async def event(self, kind: type[events.Event]) -> events.Event:
        while True:
            for one in self.events:
                if isinstance(one, kind):
                    return one
            await asyncio.sleep(0.002)

    async def train(self, ranks: int, step: int) -> None:
        for one in self.nodes[:ranks]:
            await one.until(m.Assign)
            one.say(m.SetupDone(0, ["numpy"]))
            one.step = step
            one.say(m.Progress(step))


def play(
    tmp_path: Path, job: Job, story: Callable[[Rig], Awaitable[None]]
) -> tuple[Verdict, list[events.Event]]:
    """Run `story` against a coordinator; returns its verdict, and the events as written to the file."""

    async def main() -> Verdict:
        seen: list[events.Event] = []
        coordinator = Coordinator(job, KEY, "127.0.0.1:29400", tmp_path, seen.append, run_id="test")
        rig = Rig(coordinator, await coordinator.start("127.0.0.1"), seen)
        await asyncio.wait_for(story(rig), 20)
        return await asyncio.wait_for(rig.running, 20)

    verdict = asyncio.run(main())
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    return verdict, [events.from_line(line)[1] for line in lines]


def kinds(seen: list[events.Event]) -> list[str]:
    return [type(event).__name__ for event in seen]


def test_a_job_without_failures(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.up(3)
        await rig.train(2, 7)
        for one in rig.nodes[:2]:
            one.say(m.Finished(7))
        await rig.event(events.JobEnded)

    verdict, seen = play(tmp_path, Job(nodes=2, spares=1), story)
    assert verdict == Verdict(0, "every rank has finished", "")
    assert kinds(seen) == ["JobStarted"] + 3 * ["NodeJoined"] + ["Arranged"] + 2 * ["WorkerAssigned"] + ["JobEnded"]
    assigned = seen[5]
    assert isinstance(assigned, events.WorkerAssigned)
    assert (assigned.rank, assigned.pid, assigned.generation) == (0, 5001, 0)


def test_assignments_carry_torchruns_variables_and_buddies(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.up(3)
        assign = await rig.nodes[1].until(m.Assign)
        assert isinstance(assign, m.Assign)
        assert assign.plan is None
        assert assign.env["RANK"] == "1"
        assert assign.env["LOCAL_RANK"] == "0"
        assert assign.env["WORLD_SIZE"] == "2"
        assert (assign.env["MASTER_ADDR"], assign.env["MASTER_PORT"]) == ("127.0.0.1", "29400")
        assert assign.buddies == [["127.0.0.1:9010"], ["127.0.0.1:9000"]]
        rig.coordinator.stop("SIGTERM")

    verdict, _ = play(tmp_path, Job(nodes=2, spares=1), story)
    assert verdict.exit_code == 143


def test_a_lost_node_moves_to_the_spare(tmp_path: Path) -> None:
    job = Job(nodes=2, spares=1, faults=(faults.parse("node=1 step=20 phase=backward kill"),))

    async def story(rig: Rig) -> None:
        await rig.up(3)
        await rig.train(2, 20)
        rig.nodes[1].say(m.Injecting(0))
        ack = await rig.nodes[1].until(m.InjectAck)
        assert ack == m.InjectAck(0, True)
        rig.nodes[1].channel.abort()
        assign = await rig.nodes[2].until(m.Assign)
        assert isinstance(assign, m.Assign)
        assert assign.plan is not None
        assert (assign.rank, assign.generation, assign.incarnation, assign.faults) == (1, 1, 1, [])
        assert (assign.plan.step, assign.plan.sources, assign.plan.newcomers) == (20, {1: [0]}, [1])
        assert assign.plan.keepers == {1: ["127.0.0.1:9000"]}
        assert assign.plan.buddies == [["127.0.0.1:9020"], ["127.0.0.1:9000"]]
        assert any(isinstance(one, m.Warm) for one in rig.nodes[2].got)
        finished = await rig.event(events.FailoverFinished)
        assert isinstance(finished, events.FailoverFinished)
        assert finished.moves == [events.Move(1, 1, 2, False)]
        assert finished.timings == {"copy": 0.25, "rebuild": 0.5, "replay": 0.125}
        assert finished.stages["detect"] > 0
        assert finished.seconds == pytest.approx(sum(finished.stages.values()))
        for one in (rig.nodes[0], rig.nodes[2]):
            one.say(m.Finished(30))

    verdict, seen = play(tmp_path, job, story)
    assert verdict.exit_code == 0
    assert kinds(seen)[-6:] == [
        "NodeDown", "RankFailed", "FailoverStarted", "WorkerAssigned", "FailoverFinished", "JobEnded",
    ]  # fmt: skip


def test_a_dead_worker_is_healed_in_its_own_slot(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.up(2)
        await rig.train(2, 5)
        rig.nodes[1].warm()
        rig.nodes[1].exit(-9)
        finished = await rig.event(events.FailoverFinished)
        assert isinstance(finished, events.FailoverFinished)
        assert finished.moves == [events.Move(1, 1, 1, True)]
        assert "own slot" in finished.reason
        assert rig.coordinator.generation == 1
        for one in rig.nodes:
            one.say(m.Finished(9))

    verdict, _ = play(tmp_path, Job(nodes=2), story)
    assert verdict.exit_code == 0


def test_different_digests_end_the_job(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.up(2)
        await rig.train(2, 5)
        rig.nodes[1].digest = "other"
        rig.nodes[1].warm()
        rig.nodes[1].exit(-11)

    verdict, _ = play(tmp_path, Job(nodes=2), story)
    assert verdict.exit_code == 70
    assert "rank 1 (node 1) differs from rank 0 (node 0) after update 5 in model/w" in verdict.reason


def test_a_silent_supervisor_is_lost_and_fenced(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.up(3)

        async def beat() -> None:
            while True:
                for one in (rig.nodes[0], rig.nodes[2]):
                    one.channel.post(m.Heartbeat())
                await asyncio.sleep(0.05)

        beating = asyncio.create_task(beat())
        await rig.train(2, 5)
        down = await rig.event(events.NodeDown)
        assert isinstance(down, events.NodeDown)
        assert (down.node, down.ranks) == (1, [1])
        assert "silent" in down.cause
        await rig.event(events.FailoverFinished)
        while rig.nodes[1].farewell is None:
            await asyncio.sleep(0.005)
        assert "given up" in rig.nodes[1].farewell
        beating.cancel()
        rig.coordinator.stop("SIGINT")

    verdict, _ = play(tmp_path, Job(nodes=2, spares=1, failure_timeout=0.5), story)
    assert verdict.exit_code == 130


def test_the_second_observer_is_believed_at_once(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.up(1)
        rig.coordinator.supervisor_died(0, "killed by SIGKILL")
        rig.coordinator.supervisor_died(0, "killed by SIGKILL")

    verdict, _ = play(tmp_path, Job(nodes=1), story)
    assert verdict.exit_code == 75
    assert "killed by SIGKILL" in verdict.reason
    assert "--spares 1" in verdict.reason


def test_wrong_protocol_twice_the_same_node_and_strangers_are_refused(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.up(1)
        await rig.nodes[0].until(m.Assign)
        ours = m.PROTOCOL
        for node, protocol, words in ((0, 99, "same tpwrap version"), (0, ours, "already"), (7, ours, "not part")):
            wrong = Supervisor(node, rig.port)
            await wrong.connect(protocol)
            await wrong.reading
            assert wrong.farewell is not None
            assert words in wrong.farewell
        with pytest.raises(wire.HandshakeError):
            await wire.Channel.connect("127.0.0.1", rig.port, b"another key", DECODER)
        assert not rig.running.done()
        rig.nodes[0].say(m.Finished(1))

    verdict, seen = play(tmp_path, Job(nodes=1), story)
    assert verdict.exit_code == 0
    assert sum(isinstance(event, events.Notice) for event in seen) == 3


def test_an_exception_is_reported_once_with_its_traceback(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.up(2)
        await rig.train(2, 3)
        for one in rig.nodes:
            one.say(m.Failed(3, "ValueError: no", "Traceback …", 1))
            one.exit(1)

    verdict, seen = play(tmp_path, Job(nodes=2), story)
    assert verdict.exit_code == 1
    assert verdict.traceback == "Traceback …"
    assert sum(isinstance(event, events.JobEnded) for event in seen) == 1


def test_a_handler_that_raises_does_not_harm_the_job(tmp_path: Path) -> None:
    def broken(event: events.Event) -> None:
        raise RuntimeError("display")

    async def main() -> Verdict:
        coordinator = Coordinator(Job(nodes=1), KEY, "h:1", tmp_path, broken)
        await coordinator.start("127.0.0.1")
        running = asyncio.create_task(coordinator.run())
        coordinator.stop("SIGINT")
        return await asyncio.wait_for(running, 10)

    assert asyncio.run(main()).exit_code == 130

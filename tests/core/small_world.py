"""A small world for membership to be tried in: nodes, links and workers that answer as the engine does.

Everything that could happen next is a choice, so that a test can try every order: which link delivers its
next message, which worker takes its next step, which slot warms up a worker. A message once sent on a link
comes after those before it. Time passes only when nothing else can happen. `World.check` is the oracle.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tpwrap.control import messages as m
from tpwrap.core import membership
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
    NodeLost,
    NodeStatus,
    Observation,
    Said,
    Send,
    Stage,
    State,
    Tick,
)

Choice: TypeAlias = tuple[str, int, str]
"""(what, node, worker)"""


@dataclass
class Worker:
    id: str
    node: int
    slot: int
    rank: int | None = None
    alive: bool = True
    stopped: bool = False
    stopped_at: float = 0.0
    generation: int = 0
    live: bool = False
    held: bool = False
    """between Release and Resume"""
    step: int = -1
    knows: bool = False
    """that every rank has finished its set-up; until then it reports -1"""
    done: bool = False
    """all operations of its step have finished: it holds valid gradients of all ranks"""
    asked: bool = False
    rule: bool | None = None
    voted: bool = False
    """it applies the next update whatever happens"""
    plan: m.Plan | None = None
    """received and not answered with Ready yet"""
    arrived: int = -1
    """generation whose rebuild it takes part in"""
    finished: bool = False
    buddies: tuple[int, ...] = ()


@dataclass
class Node:
    alive: bool = True
    silent: bool = False
    up: deque[Observation] = field(default_factory=deque)
    down: deque[m.CoordinatorToWorker | tuple[str, str]] = field(default_factory=deque)
    spawned: int = 0


class World:
    """One job. `step(choice)` makes one thing happen; `choices()` says what can.

    shards: of each rank, in order. redo: whether steps can run again. cut: ranks that do not keep their collectives.
    """

    def __init__(
        self, job: Job, target: int, shards: Sequence[str] = (), redo: bool = False, cut: Collection[int] = ()
    ) -> None:
        self.job = job
        self.target = target
        self.shards = list(shards) or [""] * job.world_size
        self.redo = redo
        self.cut = cut
        self.now = 0.0
        self.state: State = membership.initial(job, "127.0.0.1:1", "world", 0.0)
        self.nodes = {n: Node() for n in range(job.total_nodes)}
        self.workers: dict[str, Worker] = {}
        self.sidecars: set[tuple[int, int, int]] = set()
        """(node, rank, step): kept there"""
        self.contributed: dict[tuple[int, int], int] = {}
        """(generation, rank) -> last step whose collectives it has fed"""
        self.ballots: dict[tuple[int, int], int] = {}
        """(generation, rank) -> last step after which it has come to vote"""
        self.end: End | None = None
        self.sidecar_missing = False
        self.stop_seen_after = 10.0
        self.log: list[object] = []
        for n in self.nodes:
            self.nodes[n].up.append(Joined(n, "localhost", n, job.nproc_per_node, f"side:{n}"))

    def copy(self) -> World:
        other = copy.copy(self)
        other.nodes = {
            n: Node(node.alive, node.silent, deque(node.up), deque(node.down), node.spawned)
            for n, node in self.nodes.items()
        }
        other.workers = {name: copy.copy(worker) for name, worker in self.workers.items()}
        other.sidecars = set(self.sidecars)
        other.contributed = dict(self.contributed)
        other.ballots = dict(self.ballots)
        other.log = list(self.log)
        return other

    def key(self) -> str:
        """Equal worlds have equal keys, whatever their past (times of the past left out)."""
        s = self.state
        return repr(
            (
                [(n.alive, n.silent, list(n.up), list(n.down), n.spawned) for n in self.nodes.values()],
                sorted(map(repr, self.workers.values())),
                sorted(self.sidecars),
                sorted((k, v) for k, v in self.contributed.items() if k[0] >= s.generation),
                sorted((k, v) for k, v in self.ballots.items() if k[0] >= s.generation),
                (s.votes, [r.first for r in s.ranks.values()], s.shards()),
                (s.stage, s.generation, s.plan, sorted(s.awaiting), s.hint is None, s.hint_rounds),
                [(r.place, r.worker, r.live, r.finished, r.step, r.loss) for r in s.ranks.values()],
                [(r.strikes, r.keepers) for r in s.ranks.values()],
                (sorted(s.workers), sorted(s.released.items()), sorted(s.ready)),
                [n.status for n in s.nodes.values()],
            )
        )

    def story(self) -> str:
        """The last things that happened, for a message."""
        return "\n".join(map(str, self.log[-60:]))

    # --- what can happen ---------------------------------------------------------------------------

    def choices(self) -> list[Choice]:
        if self.end is not None:
            return []
        found: list[Choice] = []
        for n, node in self.nodes.items():
            if node.silent:
                continue
            if node.up:
                found.append(("hear", n, ""))
            if not node.alive:
                continue
            if node.down:
                found.append(("tell", n, ""))
            warm = {w.slot for w in self.on(n) if w.alive and w.rank is None}
            found += [("spawn", n, str(s)) for s in range(self.job.nproc_per_node) if s not in warm]
            found += [("learn", n, w.id) for w in self.on(n) if self.can_learn(w)]
            found += [("go", n, w.id) for w in self.on(n) if w.alive and not w.stopped and self.can_go(w)]
        return found

    def on(self, node: int) -> list[Worker]:
        return [w for w in self.workers.values() if w.node == node]

    def can_go(self, w: Worker) -> bool:
        if w.rank is None:
            return False
        if w.plan is not None:
            arrived = w.plan.step >= 0 and self.all_arrived(w.plan.generation)
            return arrived and (w.live or self.served(w, w.plan))
        if not w.live or w.held or w.finished:
            return False
        if w.step >= self.target or w.voted:
            return True
        if not w.done:
            return self.all_have(self.contributed, w)
        if w.rule is None:
            return not w.asked
        if not w.rule or self.ballots.get((w.generation, w.rank), -9) < w.step:
            return True
        return self.all_have(self.ballots, w)

    def all_have(self, which: dict[tuple[int, int], int], w: Worker) -> bool:
        """All ranks have come, in the worker's generation, to what it waits for in its step."""
        return all(which.get((w.generation, rank), -9) >= w.step for rank in range(self.job.world_size))

    def served(self, w: Worker, plan: m.Plan) -> bool:
        """The sources of a newcomer have rolled forward, where they have to."""
        assert w.rank is not None
        sources = [o for o in self.workers.values() if o.alive and o.live and o.rank in plan.sources[w.rank]]
        return all(source.step >= plan.step for source in sources)

    def can_learn(self, w: Worker) -> bool:
        fed = (self.contributed.get((w.generation, rank), -9) for rank in range(self.job.world_size))
        return w.alive and not w.stopped and w.live and not w.knows and w.step == 0 and min(fed) >= 0

    def all_arrived(self, generation: int) -> bool:
        there = {
            w.rank
            for w in self.workers.values()
            if w.alive and not w.stopped and not self.nodes[w.node].silent and w.arrived == generation
        }
        return len(there) == self.job.world_size

    # --- making it happen ----------------------------------------------------------------------------

    def step(self, choice: Choice) -> None:
        what, n, name = choice
        self.log.append((self.now, *choice))
        node = self.nodes[n]
        match what:
            case "hear":
                self.observe(node.up.popleft())
            case "tell":
                self.tell(n, node.down.popleft())
            case "spawn":
                worker = Worker(f"n{n}s{name}w{node.spawned}", n, int(name))
                node.spawned += 1
                self.workers[worker.id] = worker
                self.say(worker, m.WarmReady(1, f"addr:{worker.id}"))
            case "learn":
                self.workers[name].knows = True
            case "go":
                self.go(self.workers[name])
            case "kill":
                self.kill(self.workers[name], -9)
            case "exit0":
                self.kill(self.workers[name], 0)
            case "raise":
                worker = self.workers[name]
                self.say(worker, m.Failed(worker.step, "ValueError: x", f"Traceback {name}", 1))
                self.kill(worker, 1)
            case "stop":
                self.workers[name].stopped = True
                self.workers[name].stopped_at = self.now
            case "comm":
                worker = self.workers[name]
                self.say(worker, m.CommError(worker.generation, "reset by peer"))
            case "node":
                self.kill_node(n)
                node.up.append(NodeLost(n, "connection closed"))
            case "silence":
                node.silent = True
            case "tick":
                self.observe(Tick())

    def pass_time(self) -> None:
        """Nothing can happen: heartbeats, then the coordinator looks at its deadlines."""
        self.now += self.job.failure_timeout / 5
        for n, node in self.nodes.items():
            if node.alive and not node.silent:
                self.observe(Heard(n))
                for worker in self.on(n):
                    if worker.alive and worker.stopped and self.now - worker.stopped_at > self.stop_seen_after:
                        self.kill(worker, -9, hung=True)
        self.observe(Tick())

    def observe(self, seen: Observation) -> None:
        before = self.state
        result = membership.transition(before, seen, self.now)
        self.state = result.state
        self.check(before, result.actions)
        self.log.append((seen, result.state.stage, result.actions))
        for action in result.actions:
            match action:
                case Send(n, worker, message):
                    self.nodes[n].down.append((worker, message))  # type: ignore[arg-type]
                case KillWorker(n, worker):
                    self.nodes[n].down.append((worker, "kill"))
                case FenceNode(n, _):
                    self.kill_node(n)
                case End():
                    self.end = action
                case Emit():
                    pass

    def kill(self, worker: Worker, returncode: int, hung: bool = False) -> None:
        if worker.alive:
            worker.alive = False
            self.nodes[worker.node].up.append(Exited(worker.node, worker.id, returncode, hung))

    def kill_node(self, n: int) -> None:
        node = self.nodes[n]
        node.alive = False
        node.silent = False
        node.down.clear()
        for worker in self.on(n):
            worker.alive = False
        self.sidecars = {kept for kept in self.sidecars if kept[0] != n}

    def say(self, worker: Worker, message: m.WorkerMessage) -> None:
        self.nodes[worker.node].up.append(Said(worker.node, worker.slot, worker.id, message))

    # --- a worker, as the engine would -----------------------------------------------------------------

    def tell(self, n: int, item: object) -> None:
        assert isinstance(item, tuple)
        name, message = item
        w = self.workers[name]
        if not w.alive:
            return
        if message == "kill":
            self.kill(w, -9)
            return
        if w.stopped:
            return
        match message:
            case m.Assign(generation, rank, plan=plan):
                assert w.rank is None, "assigned twice"
                w.rank, w.generation = rank, generation
                w.rule = plan and plan.votes
                if plan is None:
                    w.live = True
                    self.use_buddies(w, message.buddies)
                    self.feed(w)
                elif plan.step < 0:
                    w.live = True
                    self.use_buddies(w, plan.buddies)
                    self.feed(w)
                else:
                    w.plan, w.arrived = plan, generation
            case m.Release(generation) if generation > w.generation:
                w.generation, w.plan, w.arrived = generation, None, -1
                if w.live:
                    w.held = True
                    self.release(w)
            case m.Plan(generation) if generation == w.generation:
                w.plan, w.arrived = message, generation
                if w.live:
                    self.obey(w, message)
                if message.step < 0:
                    w.plan = None
            case m.Resume(generation) if generation == w.generation:
                survivor = w.live and w.held
                if survivor or w.plan is None:
                    fresh = not w.live
                    w.live, w.held = True, False
                    w.knows = w.knows or w.rule is not None
                    self.feed(w)
                    if survivor or fresh:
                        self.say(w, m.Resumed(generation, {}, 0))
            case m.Rule(votes):
                assert w.rule in (None, votes), "another rule than before"
                w.rule = votes
                w.knows = w.knows or w.live
            case m.Explain(step):
                self.say(w, m.Tensors(step, {"w": self.shard(w)}))
            case m.Look():
                self.say(w, self.whereabouts(w))
            case m.Bye():
                assert w.finished

    def release(self, w: Worker) -> None:
        step = w.step if w.step or w.knows else -1
        self.say(w, m.Released(w.generation, step, 0.0, w.voted, self.replay_from(w)))

    def replay_from(self, w: Worker) -> int:
        return w.step + 1 if w.rank in self.cut and 0 <= w.step < self.target else -1

    def obey(self, w: Worker, plan: m.Plan) -> None:
        """What a survivor does with a plan."""
        if plan.votes:
            assert plan.step - 1 <= w.step <= plan.step or plan.step < 0, "all are at one step, or roll forward to it"
        else:
            assert plan.step <= w.step <= plan.step + 1 or plan.step < 0, "the log reaches one update back"
        assert w.rule in (None, plan.votes), "another rule than before"
        w.rule = plan.votes
        if plan.way == "replay":
            assert self.replay_from(w) <= plan.step or w.step < plan.step, "the log does not reach back"
        else:
            assert self.redo, "it cannot redo a step"
            w.done = w.done and w.step < plan.step
        if w.step < plan.step:
            w.voted = True
        self.use_buddies(w, plan.buddies)
        self.publish(w)

    def whereabouts(self, w: Worker) -> m.Whereabouts:
        """One collective a step, which a rank has joined once it has fed its step."""
        assert w.rank is not None
        fed = self.contributed.get((w.generation, w.rank), -9)
        blocked = w.live and not w.held and not w.finished and not self.can_go(w)
        waits = [m.Waiting("world", "allreduce", fed, 0, 1e9, True)] if blocked else []
        return m.Whereabouts(w.generation, w.step, waits, {"world": (fed, 1)}, "")

    def go(self, w: Worker) -> None:
        if w.plan is not None:
            plan, w.plan = w.plan, None
            if not w.live:
                self.restore(w, plan)
            elif w.step < plan.step:
                self.update(w)
                self.publish(w)
            if w.alive:
                self.say(w, m.Ready(plan.generation, w.step, f"digest{self.shard(w)}{w.step}", "", {}))
        elif w.step >= self.target:
            w.finished = True
            self.say(w, m.Finished(w.step))
        elif w.step < 0:
            w.step = 0
            self.say(w, m.SetupDone(w.generation, [], self.shard(w)))
            self.feed(w)
        else:
            w.done = True
            self.before_update(w)

    def before_update(self, w: Worker) -> None:
        """Ask for the rule, come to vote, or apply: one of them."""
        assert w.rank is not None
        if w.rule is None:
            w.asked = True
            self.say(w, m.FirstUpdate(self.redo, self.shard(w)))
        elif not w.rule or w.voted:
            self.update(w)
            self.feed(w)
        elif self.ballots.get((w.generation, w.rank), -9) < w.step:
            self.ballots[(w.generation, w.rank)] = w.step
        else:
            w.voted = True

    def update(self, w: Worker) -> None:
        assert w.done, "an update without valid gradients of all ranks"
        w.step += 1
        w.done = w.voted = False

    def shard(self, w: Worker) -> str:
        assert w.rank is not None
        return self.shards[w.rank]

    def restore(self, w: Worker, plan: m.Plan) -> None:
        assert w.rank is not None
        assert plan.sources[w.rank] or plan.step < 1, "nobody to copy from"
        for source in plan.sources[w.rank]:
            assert self.shards[source] == self.shard(w), "a source of another shard"
            holders = [o for o in self.workers.values() if o.alive and o.rank == source and o.live]
            assert any(o.step == plan.step for o in holders), "a source is not at the plan's step"
        keepers = [int(address.split(":")[1]) for address in plan.keepers[w.rank]]
        if not any((node, w.rank, plan.step) in self.sidecars for node in keepers):
            self.sidecar_missing = True
            self.say(w, m.Failed(plan.step, "no sidecar", "", 1))
            self.kill(w, 1)
            return
        w.step = plan.step
        w.rule = plan.votes if w.rule is None else w.rule
        self.use_buddies(w, plan.buddies)
        self.publish(w)

    def feed(self, w: Worker) -> None:
        """Publish the state of the next step, then contribute to this one (the durability rule)."""
        assert w.rank is not None
        self.publish(w)
        for node in w.buddies:
            self.keep(node, w.rank, w.step + 1)
        self.contributed[(w.generation, w.rank)] = w.step

    def publish(self, w: Worker) -> None:
        assert w.rank is not None
        for node in w.buddies:
            self.keep(node, w.rank, w.step)
            if self.contributed.get((w.generation, w.rank), -9) >= w.step:
                self.keep(node, w.rank, w.step + 1)

    def keep(self, node: int, rank: int, step: int) -> None:
        if self.nodes[node].alive:
            self.sidecars.add((node, rank, step))

    def use_buddies(self, w: Worker, buddies: list[list[str]]) -> None:
        assert w.rank is not None
        w.buddies = tuple(int(address.split(":")[1]) for address in buddies[w.rank])
        own = {w.node} if self.job.total_nodes > 1 else set()
        assert w.buddies
        up = [n for n, node in self.state.nodes.items() if node.status is NodeStatus.UP]
        assert not own.intersection(w.buddies) or len(up) == 1, "a rank keeps its own sidecar"

    # --- what must always be true ----------------------------------------------------------------------

    def check(self, before: State, actions: list[Action]) -> None:
        after = self.state
        if before.stage is Stage.ENDED:
            assert not actions, "an action after the end"
            return
        assert after.generation >= before.generation
        if before.plan is not None and after.plan is not None:
            assert after.plan.step >= before.plan.step, "the plan went back"
            assert after.plan.generation >= before.plan.generation
        ends = [n for n, action in enumerate(actions) if isinstance(action, End)]
        assert ends in ([], [len(actions) - 1]), "an action after the end"
        assert bool(ends) == (after.stage is Stage.ENDED)
        holders = [w.rank for w in after.workers.values() if w.rank is not None]
        assert len(holders) == len(set(holders)), "two workers for one rank"
        assert all(after.nodes[w.node].status is NodeStatus.UP for w in after.workers.values())
        for rank in after.ranks.values():
            if rank.worker is not None:
                assert after.workers[rank.worker].rank == rank.rank
                assert after.nodes[rank.place[0]].status is NodeStatus.UP
            assert rank.worker is not None or not rank.live
        places = [rank.place for rank in after.ranks.values()]
        assert len(places) == len(set(places)), "two ranks in one slot"
        for n, action in enumerate(actions):
            if not isinstance(action, Send):
                continue
            assert action.worker not in after.gone, "a message to a worker that is given up"
            assert after.nodes[action.node].status is NodeStatus.UP
            match action.message:
                case m.Release(generation):
                    assert generation == after.generation > before.generation
                case m.Assign(generation, rank):
                    assert generation == after.generation
                    self.check_fenced(rank, action.worker, actions[:n])
                case m.Plan(generation) | m.Resume(generation):
                    assert generation == after.generation

    def check_fenced(self, rank: int, worker: str, earlier: list[Action]) -> None:
        """Whoever held `rank` before is dead, or will be told so before it hears anything else."""
        for other in self.workers.values():
            if other.rank != rank or other.id == worker or not other.alive:
                continue
            told = any(item == (other.id, "kill") for item in self.nodes[other.node].down)
            told = told or any(isinstance(a, KillWorker) and a.worker == other.id for a in earlier)
            assert told or self.state.nodes[other.node].status is NodeStatus.DOWN, "two live workers for a rank"

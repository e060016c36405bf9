"""The way of a failure, as decisions: lose -> begin -> decide -> plan -> verify -> resume.

Every function works on a `Draft` and leaves it in a stage that waits for something, or ended. A failure that
comes in the middle goes through `lose` and `begin` again under the next generation, whatever the stage was.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tpwrap.control.messages import Assign, Failed, Plan, Ready, Release, Released, Resume, Resumed
from tpwrap.core import checks, commit, endings, events, placement, shards
from tpwrap.core.assign import environment, faults_for
from tpwrap.core.state import Draft, Failover, KillWorker, Loss, Node, NodeStatus, Stage, State


def lose(d: Draft, rank: int, loss: Loss, fence: bool, failed: Failed | None = None) -> None:
    """`rank` has lost its worker (or its slot before it got one).

    fence: the worker may still be running. failed: what its script raised, if that was the cause.
    """
    old = d.state.ranks[rank]
    worker = old.worker
    if worker is not None:
        if fence:
            d.actions.append(KillWorker(d.state.workers[worker].node, worker))
        d.drop_worker(worker)
    node, slot = old.place
    d.emit(events.RankFailed(rank, node, slot, worker or "", loss.cause, old.step, d.state.generation))
    d.put_rank(rank, worker=None, live=False, finished=False, loss=loss, failed=failed)


def begin(d: Draft, cause: str) -> None:
    """Start the next generation: everyone who holds a rank lets go of the current one."""
    if d.state.doubt is not None:
        checks.conclude(d)  # what goes on is known to be wrong
        return
    if d.state.store_lost:
        d.end(*endings.without_store(d.state, cause))
        return
    generation = d.state.generation + 1
    live = frozenset(rank for rank, view in d.state.ranks.items() if view.live)
    lost = [rank for rank, view in d.state.ranks.items() if view.loss is not None]
    d.set(
        generation=generation,
        failover=_opened(d, lost),
        hint=None,
        released={},
        ready={},
    )
    d.enter(Stage.RELEASING, live)
    for rank in d.state.ranks:
        d.send_rank(rank, Release(generation, cause))
    d.emit(events.FailoverStarted(generation, lost, cause))
    d.say(f"generation {generation}: {cause}")
    if not live:
        decide(d)


def _opened(d: Draft, lost: list[int]) -> Failover:
    """The running failover, or a new one; either way it is in stage `release` from now on."""
    failover = d.state.failover
    detected = _detected(d, lost)
    if failover is None:
        failover = Failover(marks=detected)
        d.set(failovers=d.state.failovers + 1)
    origins = dict(failover.origins)
    for rank in lost:
        origins.setdefault(rank, d.state.ranks[rank].place)
    return replace(failover, marks=(*failover.marks, ("release", d.now)), origins=origins)


def _detected(d: Draft, lost: list[int]) -> tuple[tuple[str, float], ...]:
    """The failover counts from the failure, where its time is known: it was injected, or a node fell silent."""
    nodes = {d.state.ranks[rank].place[0] for rank in lost}
    matching = [one.at for one in d.state.injections if not lost or one.rank in lost or one.node in nodes]
    d.set(injections=())
    views = [d.state.nodes[node] for node in nodes]
    silent = [view.heard for view in views if d.now - view.heard >= d.state.times.node_silence]
    return (("detect", min(matching + silent)),) if matching or silent else ()


def released(d: Draft, rank: int, report: Released) -> None:
    d.put("released", rank, report)
    d.put_rank(rank, step=report.step)
    if d.answered(rank):
        decide(d)


def decide(d: Draft) -> None:
    """All survivors have let go: choose the entry and a slot for every lost rank."""
    if not d.state.all_joined():
        return  # at start: a spare that has not connected yet may be the one; Joined or NodeLost comes
    try:
        entry = _entry(d.state)
    except commit.Impossible as error:
        d.end(endings.INTERNAL, f"internal error: {error}")
        return
    ending = _hopeless(d.state, entry)
    if ending is not None:
        d.say(entry.reason)
        d.end(*ending)
        return
    if not _place(d, entry.step):
        return
    failover = d.state.failover
    assert failover is not None
    d.set(failover=replace(failover, marks=(*failover.marks, ("decide", d.now))))
    d.enter(Stage.PLACING, frozenset(r for r, view in d.state.ranks.items() if view.worker is None))
    plan_when_warm(d)


def _entry(state: State) -> commit.Entry:
    """No plan may enter before the last one did, nor in the set-up once all had come to their first update."""
    floor = max(-1 if state.plan is None else state.plan.step, -1 if state.votes is None else 0)
    redo = [rank for rank, view in state.ranks.items() if view.first and view.first.redo and not view.finished]
    return commit.choose(state.released, bool(state.votes), floor, redo)


def _hopeless(state: State, entry: commit.Entry) -> endings.Ending | None:
    """How the job ends, where those that are left cannot go on from `entry`."""
    if not state.released:
        return endings.nobody_left(state)
    why = unhealed(state)
    if why is not None:
        return endings.not_healed(state, why)
    if entry.way is None:
        return endings.over_budget(entry.stuck)
    lost = shards.extinct(state.shards(), state.released) if entry.step >= 0 else []
    return endings.shard_lost(lost, entry.step) if lost else None


def unhealed(state: State) -> str | None:
    """Why this job goes on without healing: the rule had to be made without ranks that did not come to an update."""
    absent = state.absent()
    if state.votes is not False:
        return None
    if absent:
        return f"{shards.named(absent)} never came to an update, so nobody knows what a new worker would have to do"
    needed = shards.rule(state.shards(), state.can_redo())
    return f"some ranks came to their first update too late for a vote, but {needed.reason}" if needed.votes else None


def _place(d: Draft, step: int) -> bool:
    """Give every lost rank a slot. False: the job has ended, because there is none."""
    lost: list[placement.LostRank] = []
    for rank, view in d.state.ranks.items():
        if view.loss is None:
            continue
        if view.loss.kind == "process":
            again = view.strike_step == step
            d.put_rank(rank, strike_step=step, strikes=view.strikes + 1 if again else 1)
        view = d.state.ranks[rank]
        assert view.loss is not None
        lost.append(
            placement.LostRank(rank, view.place, view.loss.kind, view.loss.cause, max(1, view.strikes))
        )
    if not lost:
        return True
    choice = placement.choose(lost, d.state.free_slots(), d.state.job.unit, d.state.job.spares, d.state.sites())
    if isinstance(choice, placement.Unplaceable):
        d.end(*endings.no_place(d.state, choice))
        return False
    for rank, place in choice.places.items():
        d.put_rank(rank, place=place, loss=None)
    failover = d.state.failover
    assert failover is not None
    d.set(
        bad_slots=d.state.bad_slots | choice.given_up,
        failover=replace(failover, reasons=(*failover.reasons, choice.reason)),
    )
    d.say(choice.reason)
    return True


def plan_when_warm(d: Draft) -> None:
    """In PLACING: once every rank without a worker has a warm one in its slot, tell everybody the plan."""
    newcomers: dict[int, str] = {}
    for rank in d.state.awaiting:
        worker = d.state.warm_worker(d.state.ranks[rank].place)
        if worker is None:
            return
        newcomers[rank] = worker.id
    _plan(d, dict(sorted(newcomers.items())))


def _plan(d: Draft, newcomers: dict[int, str]) -> None:
    entry = _entry(d.state)
    assert entry.way is not None  # `decide` has ended the job otherwise
    members = sorted(d.state.ranks)
    for rank, worker in newcomers.items():
        take(d, rank, worker)
    not_live = [rank for rank in members if not d.state.ranks[rank].live]
    if entry.step < 0:
        for rank in not_live:  # they run the set-up, so they come to its end and to their first update once more
            d.put_rank(rank, shard=None, first=None)
    keepers: dict[int, list[str]] = {}
    for rank in not_live:
        kept = [d.state.nodes[node] for node in d.state.ranks[rank].keepers]
        keepers[rank] = [node.sidecars for node in kept if _is_up(node)]
        if entry.step > 0 and not keepers[rank]:
            d.end(*endings.sidecar_lost(rank, d.state.ranks[rank].keepers))
            return
    name_buddies(d)
    known = d.state.shards()
    plan = Plan(
        generation=d.state.generation,
        step=entry.step,
        members=[address(d.state, rank) for rank in members],
        sources={rank: shards.replicas(rank, known, entry.holders) for rank in not_live},
        newcomers=not_live,
        buddies=[buddy_addresses(d.state, rank) for rank in members],
        keepers=keepers,
        way=entry.way,
        votes=d.state.votes,
    )
    failover = d.state.failover
    assert failover is not None
    marks = (*failover.marks, ("restore", d.now))
    d.set(plan=plan, failover=replace(failover, marks=marks))
    d.say(entry.reason)
    for rank in members:
        d.send_rank(rank, assignment(d.state, rank, plan) if rank in newcomers else plan)
    for rank in newcomers:
        announce(d, rank)
    if entry.step < 0:
        # Nothing to restore and nothing to compare; newcomers join in the set-up's own rendezvous.
        resume(d, frozenset(rank for rank in members if d.state.ranks[rank].live))
    else:
        d.enter(Stage.RESTORING, frozenset(members))


def ready(d: Draft, rank: int, report: Ready) -> None:
    d.put("ready", rank, report)
    if not d.answered(rank):
        return
    assert d.state.plan is not None
    verdict = commit.verify(d.state.ready, d.state.shards(), d.state.plan.step if d.state.votes else None)
    d.say(verdict.reason)
    if not verdict.agree:
        cannot = f"generation {d.state.generation} cannot go on: "
        guessed = [rank for rank in verdict.apart if d.state.ranks[rank].shard is None]
        if guessed:
            d.end(*endings.set_up_differs(guessed))
        elif verdict.apart:
            checks.doubt(d, verdict.step, verdict.apart, cannot)
        else:
            d.end(endings.INTERNAL, cannot + verdict.reason)
        return
    _add_timings(d, events.slowest(report.timings for report in d.state.ready.values()))
    resume(d, frozenset(d.state.ranks))


def resume(d: Draft, expected: frozenset[int]) -> None:
    """Let everybody go; `expected` will say Resumed."""
    failover, plan = d.state.failover, d.state.plan
    assert failover is not None
    assert plan is not None
    for newcomer in plan.newcomers:
        d.put_rank(newcomer, live=True, step=plan.step)
    for rank in d.state.ranks:
        d.send_rank(rank, Resume(d.state.generation))
    d.set(failover=replace(failover, marks=(*failover.marks, ("resume", d.now))))
    d.enter(Stage.RESUMING, expected)
    if not expected:
        _finish(d)


def resumed(d: Draft, rank: int, report: Resumed) -> None:
    failover = d.state.failover
    assert failover is not None
    muted = Counter(failover.muted) + Counter(report.muted)
    d.set(failover=replace(failover, replayed=max(failover.replayed, report.replayed), muted=muted))
    _add_timings(d, report.timings)
    if d.answered(rank):
        _finish(d)


def _add_timings(d: Draft, timings: dict[str, float]) -> None:
    failover = d.state.failover
    assert failover is not None
    d.set(failover=replace(failover, timings=events.slowest([failover.timings, timings])))


def _finish(d: Draft) -> None:
    failover, plan = d.state.failover, d.state.plan
    assert failover is not None
    assert plan is not None
    moves = [
        events.Move(rank, place[0], d.state.ranks[rank].place[0], place == d.state.ranks[rank].place)
        for rank, place in sorted(failover.origins.items())
    ]
    reason = "; ".join(failover.reasons) or "no rank was lost: same members, new communicators"
    d.emit(
        events.FailoverFinished(
            generation=d.state.generation,
            ranks=sorted(failover.origins),
            moves=moves,
            step=plan.step,
            stages=events.timeline(failover.marks, d.now),
            timings=dict(failover.timings),
            seconds=d.now - failover.marks[0][1],
            replayed=failover.replayed,
            muted=dict(failover.muted),
            way=plan.way,
            reason=reason,
        )
    )
    if plan.step >= 0:
        for rank, view in d.state.ranks.items():
            if view.failed is not None:
                d.put_rank(rank, failed=None)
    d.set(failover=None)
    d.enter(Stage.RUNNING, frozenset())


# --- giving a rank to a worker ---------------------------------------------------------------------


def take(d: Draft, rank: int, worker: str) -> None:
    """`worker` holds `rank` from now on."""
    d.put_worker(replace(d.state.workers[worker], rank=rank))
    incarnation = d.state.ranks[rank].incarnation + 1
    d.put_rank(rank, worker=worker, incarnation=incarnation, assigned_at=d.now)


def announce(d: Draft, rank: int) -> None:
    view = d.state.ranks[rank]
    assert view.worker is not None
    worker = d.state.workers[view.worker]
    d.emit(
        events.WorkerAssigned(
            rank, worker.node, worker.slot, worker.id, worker.pid, d.state.generation, view.incarnation
        )
    )


def assignment(state: State, rank: int, plan: Plan | None) -> Assign:
    view = state.ranks[rank]
    return Assign(
        generation=state.generation,
        rank=rank,
        world_size=state.job.world_size,
        env=environment(state.job, rank, view.place[1], state.store, state.run_id),
        store=state.store,
        incarnation=view.incarnation,
        faults=faults_for(state.job.faults, state.fired, rank, view.place),
        buddies=[buddy_addresses(state, other) for other in sorted(state.ranks)],
        plan=plan,
    )


def address(state: State, rank: int) -> str:
    worker = state.ranks[rank].worker
    assert worker is not None
    return state.workers[worker].address


# --- sidecars ----------------------------------------------------------------------------------------


def name_buddies(d: Draft) -> None:
    """Choose every rank's buddies anew, and remember the old ones: its last sidecar may be there only."""
    job = d.state.job
    holding = sorted({view.place[0] for view in d.state.ranks.values()})
    idle = d.state.spare_nodes()
    by_node = {
        node: placement.buddies(node, holding, idle, job.sidecar_copies, job.total_nodes) for node in holding
    }
    up = set(d.state.up_nodes())
    for rank, view in d.state.ranks.items():
        chosen = by_node[view.place[0]]
        older = tuple(node for node in view.keepers if node not in chosen and node in up)
        if view.buddies != chosen or view.keepers != chosen + older:
            d.put_rank(rank, buddies=chosen, keepers=chosen + older)


def buddy_addresses(state: State, rank: int) -> list[str]:
    return [state.nodes[node].sidecars for node in state.ranks[rank].buddies]


def without_buddy(state: State) -> list[int]:
    """Ranks all of whose buddies are down: a failure of theirs could not be healed."""
    up = set(state.up_nodes())
    return [
        rank
        for rank, view in state.ranks.items()
        if view.buddies and view.worker is not None and not up.intersection(view.buddies)
    ]


def _is_up(node: Node) -> bool:
    return node.status is NodeStatus.UP

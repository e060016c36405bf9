"""Who is a member of the job, decided: `(state, observation, now) -> Transition`.

The only place where anything about membership is decided. It does no I/O and reads no clock, so every
interleaving can be tried (tests/core/test_model.py does). What a failure does step by step is in
`tpwrap.core.recovery`; here are the observations and what each of them means in each stage.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from tpwrap.control import messages as m
from tpwrap.core import checks, endings, events, exits, lint, placement, recovery, shards, standstill
from tpwrap.core.arrangement import arrange
from tpwrap.core.job import Job
from tpwrap.core.signals import EXIT_CODES
from tpwrap.core.state import (
    Draft,
    Exited,
    FenceNode,
    Heard,
    Hint,
    Injection,
    Joined,
    Left,
    Loss,
    Node,
    NodeLost,
    NodeStatus,
    Observation,
    Rank,
    Said,
    SlotBroken,
    Stage,
    State,
    Stop,
    StoreLost,
    Tick,
    Transition,
    Worker,
)
from tpwrap.core.timeouts import Timeouts

HINT_ROUNDS = 5
"""so many recoveries in a row at the same step without a known failure: the network will not heal"""


def initial(job: Job, store: str, run_id: str, now: float, times: Timeouts | None = None) -> State:
    """The state of a job before any supervisor has connected. store: host:port."""
    ranks = {rank: Rank(rank, place) for rank, place in enumerate(placement.initial(job))}
    return State(
        job=job,
        times=times or Timeouts.derive(job.failure_timeout),
        store=store,
        run_id=run_id,
        stage=Stage.STARTING,
        since=now,
        last_tick=now,
        nodes={node: Node(heard=now) for node in range(job.total_nodes)},
        ranks=ranks,
        awaiting=frozenset(ranks),
    )


def refusal(state: State, node: int, slots: int, protocol: int) -> str | None:
    """Why a supervisor that says Hello may not join; None: it may."""
    if protocol != m.PROTOCOL:
        return (
            f"this supervisor speaks protocol {protocol}, the coordinator {m.PROTOCOL}: "
            "install the same tpwrap version on every node"
        )
    if state.ended:
        return "the job has ended"
    if node not in state.nodes:
        return f"node {node} is not part of this job (nodes 0 to {state.job.total_nodes - 1})"
    status = state.nodes[node].status
    if status is NodeStatus.UP:
        return f"node {node} is connected already"
    if status is NodeStatus.DOWN:
        return f"node {node} was given up; its ranks have moved"
    if slots < state.job.nproc_per_node:
        return f"node {node} has {slots} slots, the job needs {state.job.nproc_per_node} on each node"
    return None


def transition(state: State, observation: Observation, now: float) -> Transition:
    """What `observation` changes and what is to be done about it. After the end: nothing."""
    d = Draft(state, now)
    if state.ended:
        return d.done()
    match observation:
        case Joined():
            _joined(d, observation)
        case Heard(node):
            _heard(d, node)
        case NodeLost(node, how):
            _node_lost(d, {node: how})
        case Exited():
            _exited(d, observation)
        case SlotBroken():
            _slot_broken(d, observation)
        case Said():
            _said(d, observation)
        case Tick():
            _tick(d)
        case Stop(signal):
            d.end(EXIT_CODES.get(signal, 130), f"stopped by {signal}")
        case Left(node, signal):
            _left(d, node, signal)
        case StoreLost():
            _store_lost(d)
    return d.done()


# --- nodes -------------------------------------------------------------------------------------------


def _joined(d: Draft, seen: Joined) -> None:
    d.put_node(
        seen.node,
        status=NodeStatus.UP,
        host=seen.host,
        slots=seen.slots,
        sidecars=seen.sidecars,
        heard=d.now,
        site=seen.site,
    )
    d.emit(events.NodeJoined(seen.node, seen.host, seen.pid, seen.slots, seen.name))
    _start_again(d)


def _start_again(d: Draft) -> None:
    """What waited for the last supervisor to connect, or to be given up."""
    if d.state.all_joined():
        if d.state.stage is Stage.STARTING:
            d.set(since=d.now)
            _arrange(d)
            _leave_broken_slots(d)
            if d.state.stage is Stage.STARTING:
                _assign_first(d)
        elif d.state.stage is Stage.RELEASING and not d.state.awaiting:
            recovery.decide(d)


def _arrange(d: Draft) -> None:
    """Everybody is there: who trains, who waits? Before any rank has been given out."""
    if any(view.worker is not None for view in d.state.ranks.values()):
        return
    sites = {node: d.state.nodes[node].site for node in d.state.up_nodes()}
    if len(sites) < d.state.job.nodes:
        return  # the loss of the others is being dealt with
    chosen = arrange(sites, d.state.job.nodes)
    for rank, place in enumerate(placement.initial(d.state.job, chosen.training)):
        d.put_rank(rank, place=place)
    d.emit(events.Arranged(chosen.training, chosen.spares, chosen.reason))
    d.say(chosen.reason)


def _heard(d: Draft, node: int) -> None:
    if d.state.nodes[node].status is NodeStatus.UP:
        d.put_node(node, heard=d.now)


def _node_lost(d: Draft, lost: dict[int, str]) -> None:
    lost = {node: how for node, how in lost.items() if d.state.nodes[node].status is not NodeStatus.DOWN}
    failed: list[int] = []
    for node, how in lost.items():
        ranks = [rank for rank, view in d.state.ranks.items() if view.place[0] == node]
        d.put_node(node, status=NodeStatus.DOWN)
        d.emit(events.NodeDown(node, how, ranks))
        d.actions.append(FenceNode(node, how))
        for rank in ranks:
            recovery.lose(d, rank, Loss("node", how), fence=False)
        for worker in [one for one in d.state.workers.values() if one.node == node]:
            d.drop_worker(worker.id)
        failed += ranks
        if not ranks:
            d.emit(events.SpareLost(node, how, len(d.state.spare_nodes())))
            _tell_of_lost_buddy(d, node)
    if failed:
        what = "; ".join(f"node {node} is lost ({how})" for node, how in lost.items())
        recovery.begin(d, what)
    elif d.state.stage in (Stage.RUNNING, Stage.RESUMING, Stage.RESTORING, Stage.STARTING):
        _start_again(d)
        _keep_buddies(d)
    else:
        _start_again(d)


def _tell_of_lost_buddy(d: Draft, node: int) -> None:
    for rank, view in d.state.ranks.items():
        if node in view.buddies:
            d.send_rank(rank, m.BuddyLost(d.state.nodes[node].sidecars))


def _left(d: Draft, node: int, signal: str) -> None:
    """Slurm signals every process of a job that is to end (scancel, the time limit); a host that is shut down, or a
    person, one node only. The second node, or the coordinator's own process, tells which it is."""
    if d.state.nodes[node].status is not NodeStatus.UP:
        return
    d.put("leaving", node, (d.now, signal))
    if len(d.state.leaving) > 1 or len(d.state.up_nodes()) == 1:
        d.end(EXIT_CODES.get(signal, 130), f"stopped by {signal}")


def _gone_alone(d: Draft) -> bool:
    """Whether a node has left and nobody else: it is lost like any other."""
    alone = {
        node: f"its supervisor was told to end by {signal}"
        for node, (since, signal) in d.state.leaving.items()
        if d.now - since >= d.state.times.stop_grace / 2
    }
    if alone:
        d.set(leaving={})
        _node_lost(d, alone)
    return bool(alone)


def _keep_buddies(d: Draft) -> None:
    """A spare that dies idle disturbs nobody, unless it was the last to keep some rank's sidecar."""
    exposed = recovery.without_buddy(d.state)
    if exposed and not d.state.store_lost:
        which = ", ".join(map(str, exposed))
        recovery.begin(d, f"new buddies are needed: no node is left that keeps the sidecar of rank {which}")


def _store_lost(d: Draft) -> None:
    """Communicators that stand go on without it; those that have to be made need it."""
    d.set(store_lost=True)
    if d.state.stage not in (Stage.RUNNING, Stage.RESUMING):
        cause = "ranks were starting" if d.state.failover is None else "a failure was being healed"
        d.end(*endings.without_store(d.state, cause))


# --- workers -----------------------------------------------------------------------------------------


def _exited(d: Draft, seen: Exited) -> None:
    worker = d.state.workers.get(seen.worker)
    if worker is None or worker.node != seen.node:
        return  # fenced before, or never warm: its supervisor starts another one
    if worker.rank is None:
        d.drop_worker(worker.id)
        return
    if seen.hung:
        cause = "its worker was stopped for too long and was killed"
    elif seen.returncode < 0:
        cause = f"its worker {exits.describe(seen.returncode)}"
    else:
        cause = f"its worker ended with exit code {seen.returncode} before its script was done"
    _lose_processes(d, {worker.rank: Loss("process", cause, seen.returncode == 0)}, fence=False)


def _lose_processes(d: Draft, losses: dict[int, Loss], fence: bool) -> None:
    for rank, loss in losses.items():
        recovery.lose(d, rank, loss, fence)
    recovery.begin(d, "; ".join(f"rank {rank}: {loss.cause}" for rank, loss in losses.items()))


def _slot_broken(d: Draft, seen: SlotBroken) -> None:
    if d.state.nodes[seen.node].status is not NodeStatus.UP:
        return
    place = (seen.node, seen.slot)
    d.emit(events.Notice("warning", f"node {seen.node}: slot {seen.slot} has no warm worker: {seen.how}"))
    if any(view.place == place and view.worker is not None for view in d.state.ranks.values()):
        return  # its supervisor tries again when that worker ends
    d.set(broken={**d.state.broken, place: seen})
    _leave_broken_slots(d)


def _leave_broken_slots(d: Draft) -> None:
    """Whoever waits for a worker in a slot that brings none up needs another slot, and need not wait any longer."""
    if not d.state.all_joined():
        return
    waiting: dict[int, Loss] = {}
    for rank, view in d.state.ranks.items():
        broken = d.state.broken.get(view.place)
        if broken is None or view.worker is not None:
            continue
        loss = Loss("slot", f"of its new workers, {broken.how}")
        if view.loss is None:
            waiting[rank] = loss
        elif view.loss.kind == "process":
            d.put_rank(rank, loss=loss)
    if waiting:
        _lose_processes(d, waiting, fence=False)


def _said(d: Draft, seen: Said) -> None:
    if d.state.nodes[seen.node].status is not NodeStatus.UP or seen.worker in d.state.gone:
        return
    message = seen.message
    if isinstance(message, m.WarmReady):
        _warm(d, seen, message)
        return
    worker = d.state.workers.get(seen.worker)
    if worker is None or worker.node != seen.node:
        return
    if isinstance(message, m.Notice):
        _notice(d, worker, message)
        return
    if worker.rank is None:
        return  # only these two mean anything before a worker holds a rank
    _rank_said(d, worker.rank, message)


def _warm(d: Draft, seen: Said, message: m.WarmReady) -> None:
    if seen.worker in d.state.workers or not 0 <= seen.slot < d.state.nodes[seen.node].slots:
        return
    d.put_worker(Worker(seen.worker, seen.node, seen.slot, message.pid, message.address))
    if (seen.node, seen.slot) in d.state.broken:
        d.set(broken={place: how for place, how in d.state.broken.items() if place != (seen.node, seen.slot)})
    if d.state.modules:
        d.send(seen.worker, m.Warm(list(d.state.modules)))
    if d.state.stage is Stage.STARTING:
        _assign_first(d)
    elif d.state.stage is Stage.PLACING:
        recovery.plan_when_warm(d)


def _assign_first(d: Draft) -> None:
    """Generation 0: each rank as soon as its slot's worker is warm; they meet through the store."""
    if not d.state.all_joined():
        return  # buddies are named in the assignment
    for rank in sorted(d.state.awaiting):
        worker = d.state.warm_worker(d.state.ranks[rank].place)
        if worker is None:
            continue
        if not d.state.ranks[rank].buddies:
            recovery.name_buddies(d)
        recovery.take(d, rank, worker.id)
        d.put_rank(rank, live=True)
        d.send(worker.id, recovery.assignment(d.state, rank, plan=None))
        recovery.announce(d, rank)
        if d.answered(rank):
            d.enter(Stage.RUNNING, frozenset())


def _notice(d: Draft, worker: Worker, message: m.Notice) -> None:
    if message.text not in d.state.notices:  # all ranks tend to say the same
        d.set(notices=d.state.notices | {message.text})
        d.emit(events.Notice(message.level, message.text, worker.rank))


def _protection(d: Draft, rank: int, facts: lint.Facts) -> None:
    view = d.state.ranks[rank]
    others = sum(node != view.place[0] for node in view.buddies)
    facts = msgspec.structs.replace(facts, buddies=others)
    if facts.weights:
        first = d.state.weights.get(facts.step)
        if first is None:
            d.set(weights={**d.state.weights, facts.step: (rank, facts.weights)})
        else:
            facts = lint.compared(facts, rank, first)
    told, reports = lint.news(d.state.told, rank, facts)
    d.set(told=told)
    for report in reports:
        d.emit(events.Protection(report.rank, facts.step, report.lines, report.findings))
    unprotected = lint.unprotected(lint.judge(facts))
    if d.state.job.strict and unprotected:
        d.end(*endings.not_protected(rank, unprotected))


def _rank_said(d: Draft, rank: int, message: m.WorkerMessage) -> None:
    stage = d.state.stage
    match message:
        case m.Progress(step):
            if step > d.state.ranks[rank].step:
                d.put_rank(rank, step=step)
                standstill.stepped(d)
        case m.SetupDone():
            _set_up(d, rank, message)
        case m.Digest():
            checks.told(d, rank, message)
        case m.Tensors():
            checks.explained(d, rank, message)
        case m.FirstUpdate():
            _first_update(d, rank, message)
        case m.Injecting(fault):
            _injecting(d, rank, fault)
        case m.Finished(step):
            _finished(d, rank, step)
        case m.Whereabouts(generation) if generation == d.state.generation:
            standstill.answered(d, rank, message)
        case m.Failed():
            _script_failed(d, rank, message)
        case m.Protection(facts):
            _protection(d, rank, facts)
        case m.Unprotected(reason):
            d.end(*endings.unprotected([rank], reason))
        case m.CommError(generation, error) if generation == d.state.generation:
            _comm_error(d, rank, error)
        case m.Released(generation) if generation == d.state.generation:
            if stage is Stage.RELEASING and rank in d.state.awaiting:
                recovery.released(d, rank, message)
        case m.Ready(generation) if generation == d.state.generation:
            if stage is Stage.RESTORING and rank in d.state.awaiting:
                recovery.ready(d, rank, message)
        case m.Resumed(generation) if generation == d.state.generation:
            if stage is Stage.RESUMING and rank in d.state.awaiting:
                recovery.resumed(d, rank, message)
        case _:
            pass  # of an older generation: dropped, never obeyed


def _set_up(d: Draft, rank: int, message: m.SetupDone) -> None:
    took = d.now - d.state.ranks[rank].assigned_at
    d.set(any_set_up=True, setup_seconds=max(took, d.state.setup_seconds))
    standstill.moved(d)
    d.put_rank(rank, step=max(0, d.state.ranks[rank].step), shard=message.shard)
    new = [name for name in message.modules if name not in d.state.modules]
    if new:
        d.set(modules=(*d.state.modules, *new))
        for worker in d.state.workers.values():
            if worker.rank is None:
                d.send(worker.id, m.Warm(new))


def _first_update(d: Draft, rank: int, message: m.FirstUpdate) -> None:
    """It waits for the rule, which is made once: when all ranks wait, or those that have failed since then have."""
    if d.state.votes is None:
        d.put_rank(rank, first=message)
        d.set(first_update=d.now if d.state.first_update is None else d.state.first_update)
        _make_rule(d)
        return
    if d.state.ranks[rank].first is None:
        d.put_rank(rank, first=message)
        _tell_unhealed(d)
    d.send_rank(rank, m.Rule(d.state.votes))


def _make_rule(d: Draft) -> None:
    if not d.state.absent():
        d.set(votes=False)  # from now on the names of the first update count
        _rule(d, shards.rule(d.state.shards(), d.state.can_redo()))


def _rule_without_absent(d: Draft) -> None:
    """Some ranks never update (they only evaluate, say), or wait for those that wait here: the job must not hang."""
    first, limit = d.state.first_update, d.state.times.first_update
    if d.state.votes is None and first is not None and d.now - max(first, d.state.since) > limit:
        d.set(votes=False)
        _rule(d, shards.without(d.state.absent(), d.state.shards(), limit))
        _tell_unhealed(d)


def _tell_unhealed(d: Draft) -> None:
    why = recovery.unhealed(d.state)
    if why is not None:
        d.emit(events.Notice("warning", f"{why}: a failure would end the job"))


def _rule(d: Draft, rule: shards.Rule) -> None:
    d.set(votes=rule.votes)
    d.emit(events.Ruled(rule.shards, rule.votes, rule.reason))
    d.say(f"every update waits for a vote: {rule.reason}" if rule.votes else f"no votes: {rule.reason}")
    for rank in d.state.ranks:
        d.send_rank(rank, m.Rule(rule.votes))


def _injecting(d: Draft, rank: int, fault: int) -> None:
    fire = 0 <= fault < len(d.state.job.faults) and fault not in d.state.fired
    if fire:
        node = d.state.ranks[rank].place[0]
        d.set(
            fired=d.state.fired | {fault},
            injections=(*d.state.injections, Injection(d.now, rank, node)),
        )
        d.emit(events.FaultInjected(str(d.state.job.faults[fault]), rank, node))
    d.send_rank(rank, m.InjectAck(fault, fire))


def _finished(d: Draft, rank: int, step: int) -> None:
    d.put_rank(rank, finished=True, step=max(step, d.state.ranks[rank].step))
    standstill.moved(d)
    if not all(view.finished for view in d.state.ranks.values()):
        if d.state.votes is None:
            _make_rule(d)  # the others need not wait for one that never updates
        return
    if d.state.doubt is not None:
        return  # the answers will end the job
    for other in d.state.ranks:
        d.send_rank(other, m.Bye())
    d.end(0, "every rank has finished")


def _script_failed(d: Draft, rank: int, message: m.Failed) -> None:
    d.put_rank(rank, failed=message, failed_at=d.now)
    ending = endings.everyone_raised(d.state, d.now)
    if ending is not None:
        d.end(*ending)
        return
    recovery.lose(d, rank, Loss("process", message.error), fence=True, failed=message)
    recovery.begin(d, f"rank {rank}: {message.error}")


def _comm_error(d: Draft, rank: int, error: str) -> None:
    # While survivors let go, or wait for a warm worker, nothing of the current generation can fail.
    if d.state.hint is None and d.state.stage not in (Stage.RELEASING, Stage.PLACING):
        d.set(hint=Hint(d.now, rank, error))


# --- time --------------------------------------------------------------------------------------------


def _tick(d: Draft) -> None:
    late = d.now - d.state.last_tick > 3 * d.state.times.heartbeat
    lost = d.now - d.state.last_tick
    d.set(last_tick=d.now)
    if late:
        _forgive(d, lost)
        return
    if checks.overdue(d) or _silent_nodes(d) or _gone_alone(d):
        return
    hint = d.state.hint
    if hint is not None and d.now - hint.since >= d.state.times.comm_error_grace:
        _heal_without_death(d, hint)
        return
    _stage_deadline(d)


def _forgive(d: Draft, lost: float) -> None:
    """The coordinator itself was not running: the silence was its own, so nobody is blamed for it."""
    for node in d.state.up_nodes():
        d.put_node(node, heard=d.now)
    hint = d.state.hint
    first = d.state.first_update
    d.set(first_update=None if first is None else first + lost)
    d.set(since=d.state.since + lost, hint=hint and replace(hint, since=hint.since + lost))
    standstill.moved(d)
    d.say(f"the coordinator was held up for {lost:.1f} s; all deadlines start again")


def _not_rebuilt(d: Draft, limit: str, ranks: list[int]) -> None:
    """One that hangs keeps all others from being ready. They let go once more: whoever hangs does not answer that, and
    is blamed alone. If all do, and are not ready a second time, there is nothing left but to replace them."""
    failover = d.state.failover
    assert failover is not None
    if len(ranks) == 1 or failover.started_over:
        cause = f"it did not rebuild its communicators {limit}"
        _lose_processes(d, {rank: Loss("process", cause) for rank in ranks}, fence=True)
        return
    d.set(failover=replace(failover, started_over=True))
    recovery.begin(d, f"ranks {', '.join(map(str, ranks))} did not rebuild their communicators {limit}; once more")


def _silent_nodes(d: Draft) -> bool:
    limit, join = d.state.times.node_silence, d.state.times.join
    lost: dict[int, str] = {}
    for index, node in d.state.nodes.items():
        silent = d.now - node.heard
        if node.status is NodeStatus.UP and silent > limit:
            lost[index] = f"its supervisor was silent for {silent:.1f} s"
        elif node.status is NodeStatus.EXPECTED and silent > join:
            lost[index] = f"its supervisor did not connect within {join:g} s"
    if lost:
        _node_lost(d, lost)
    return bool(lost)


def _heal_without_death(d: Draft, hint: Hint) -> None:
    step = max(view.step for view in d.state.ranks.values())
    rounds = d.state.hint_rounds + 1 if step == d.state.hint_step else 1
    d.set(hint_step=step, hint_rounds=rounds)
    if rounds > HINT_ROUNDS:
        d.end(
            endings.INTERNAL,
            f"collectives fail again and again at step {step} though no rank has died; "
            f"last, on rank {hint.rank}: {hint.error}",
        )
        return
    recovery.begin(d, f"a collective failed on rank {hint.rank} and nobody has died: {hint.error}")


def _stage_deadline(d: Draft) -> None:
    times, waited = d.state.times, d.now - d.state.since
    views = [d.state.ranks[rank] for rank in sorted(d.state.awaiting)]
    if d.state.stage is Stage.RUNNING:
        standstill.look(d)
        if not d.state.ended:
            _rule_without_absent(d)
    elif d.state.stage is Stage.RELEASING and waited > times.release:
        cause = f"it did not let go of its communicators within {times.release:g} s"
        if views:
            _lose_processes(d, {view.rank: Loss("process", cause) for view in views}, fence=True)
    elif d.state.stage is Stage.RESTORING:
        # Set-up is the user's: how long it may take is known from the first time.
        extra = 2 * d.state.setup_seconds
        newcomers = [view for view in views if not view.live]
        if newcomers and waited > times.restore + extra:
            cause = f"its new worker was not ready within {times.restore + extra:.0f} s"
            _lose_processes(d, {view.rank: Loss("process", cause) for view in newcomers}, fence=True)
        elif waited > times.ready + extra:
            _not_rebuilt(d, f"within {times.ready + extra:.0f} s", [view.rank for view in views])
    elif d.state.stage in (Stage.STARTING, Stage.PLACING) and waited > times.warm and d.state.all_joined():
        cause = f"no worker became warm within {times.warm:g} s"
        stuck = [view for view in views if d.state.warm_worker(view.place) is None]
        if stuck:
            _lose_processes(d, {view.rank: Loss("slot", cause) for view in stuck}, fence=False)

"""The rules of membership one by one; their interplay is in test_model.py."""

from __future__ import annotations

from typing import TypeVar

import pytest

from tpwrap.control import messages as m
from tpwrap.core import events, faults, lint, membership
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
    Stage,
    Stop,
    StoreLost,
    Tick,
)
from tpwrap.report import story

M = TypeVar("M", bound=m.Message)
E = TypeVar("E")


class Play:
    """A job that is driven by hand. `see` returns the actions of one observation."""

    def __init__(self, job: Job, start: bool = True, step: int = 20) -> None:
        self.job = job
        self.now = 100.0
        self.state = membership.initial(job, "10.0.0.1:29400", "run", self.now)
        self.actions: list[Action] = []
        self.log: list[Action] = []
        self.spawned = 0
        if start:
            for node in range(job.total_nodes):
                self.join(node)
            for node in range(job.total_nodes):
                for slot in range(job.nproc_per_node):
                    self.warm(node, slot)
            for rank in range(job.world_size):
                self.say(rank, m.SetupDone(0, ["numpy"]))
                self.say(rank, m.Progress(step))

    def see(self, seen: Observation, after: float = 0.0) -> list[Action]:
        self.now += after
        result = membership.transition(self.state, seen, self.now)
        self.state, self.actions = result.state, result.actions
        self.log += result.actions
        return result.actions

    def wait(self, seconds: float) -> list[Action]:
        """Time passes, all supervisors that are up send heartbeats."""
        collected: list[Action] = []
        while seconds > 0 and self.state.stage is not Stage.ENDED:
            self.now += 0.5
            seconds -= 0.5
            for node in self.state.up_nodes():
                self.see(Heard(node))
            collected += self.see(Tick())
        return collected

    def join(self, node: int) -> list[Action]:
        return self.see(Joined(node, f"host{node}", 1, self.job.nproc_per_node, f"side:{node}"))

    def warm(self, node: int, slot: int = 0) -> list[Action]:
        name = f"n{node}s{slot}w{self.spawned}"
        self.spawned += 1
        return self.see(Said(node, slot, name, m.WarmReady(self.spawned, f"state:{name}")))

    def say(self, rank: int, message: m.WorkerMessage) -> list[Action]:
        name = self.state.ranks[rank].worker
        assert name is not None
        worker = self.state.workers[name]
        return self.see(Said(worker.node, worker.slot, name, message))

    def die(self, rank: int, returncode: int = -9) -> list[Action]:
        name = self.state.ranks[rank].worker
        assert name is not None
        return self.see(Exited(self.state.workers[name].node, name, returncode))

    def release(self, step: int, *ranks: int) -> list[Action]:
        for rank in ranks or tuple(self.state.awaiting):
            self.say(rank, m.Released(self.state.generation, step, 0.0))
        return self.actions

    def ready(self, step: int, digest: str = "d") -> list[Action]:
        for rank in sorted(self.state.awaiting):
            self.say(rank, m.Ready(self.state.generation, step, digest, "", {}))
        return self.actions

    def resumed(self) -> list[Action]:
        for rank in sorted(self.state.awaiting):
            self.say(rank, m.Resumed(self.state.generation, {}, 0))
        return self.actions

    def heal(self, step: int) -> None:
        self.release(step)
        self.ready(step)
        self.resumed()
        assert self.state.stage is Stage.RUNNING


def in_set_up(job: Job) -> Play:
    """All nodes have joined, and every rank has its worker, which has told nothing yet."""
    play = Play(job, start=False)
    for node in range(job.total_nodes):
        play.join(node)
        play.warm(node)
    return play


def sent(actions: list[Action], kind: type[M]) -> dict[str, M]:
    return {a.worker: a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)}


def emitted(actions: list[Action], kind: type[E]) -> list[E]:
    return [a.event for a in actions if isinstance(a, Emit) and isinstance(a.event, kind)]


def ending(actions: list[Action]) -> End:
    assert isinstance(actions[-1], End), actions
    return actions[-1]


# --- start and end ---------------------------------------------------------------------------------


def test_ranks_are_assigned_once_every_supervisor_is_known_and_as_workers_get_warm() -> None:
    play = Play(Job(nodes=2, spares=1), start=False)
    play.join(0)
    play.join(1)
    assert not sent(play.warm(0), m.Assign)  # the spare's sidecar address is not known yet
    (assign,) = sent(play.join(2), m.Assign).values()
    assert (assign.rank, assign.generation, assign.plan, assign.incarnation) == (0, 0, None, 0)
    assert play.state.stage is Stage.STARTING
    (assign,) = sent(play.warm(1), m.Assign).values()
    assert assign.rank == 1
    assert play.state.stage is Stage.RUNNING
    assert not sent(play.warm(2), m.Assign)


def test_a_supervisor_that_never_connects_is_replaced() -> None:
    play = Play(Job(nodes=2, spares=1), start=False)
    play.join(0)
    play.warm(0)
    play.join(2)
    play.warm(2)
    actions = play.wait(61)
    assigned = sent(actions, m.Assign)
    assert {a.rank for a in assigned.values()} == {0, 1}
    assert all(a.plan is not None and a.plan.step == -1 for a in assigned.values())
    assert sent(actions, m.Resume).keys() == assigned.keys()
    assert play.state.stage is Stage.RUNNING


def test_all_finished_ends_with_0_and_bye() -> None:
    play = Play(Job(nodes=2))
    assert play.say(0, m.Finished(30)) == []
    actions = play.say(1, m.Finished(30))
    assert len(sent(actions, m.Bye)) == 2
    assert ending(actions).exit_code == 0
    assert emitted(actions, events.JobEnded)[0].steps == 30
    assert play.see(Tick()) == []


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_stop(name: str, code: int) -> None:
    assert ending(Play(Job(nodes=2)).see(Stop(name))).exit_code == code


def test_a_worker_that_finished_and_dies_early_is_healed_like_any_other() -> None:
    play = Play(Job(nodes=2))
    play.say(0, m.Finished(30))
    play.warm(0)
    play.die(0, 0)
    play.release(29)
    assert play.state.plan is not None
    assert play.state.plan.newcomers == [0]


# --- the way of a failure ----------------------------------------------------------------------------


def test_the_way_of_a_failure_in_order() -> None:
    play = Play(Job(nodes=4, spares=1))
    play.warm(1)
    actions = play.die(1)
    assert sent(actions, m.Release).keys() == {"n0s0w0", "n2s0w2", "n3s0w3"}
    assert not [a for a in actions if isinstance(a, KillWorker)]  # it is dead already
    assert emitted(actions, events.RankFailed)[0].cause == "its worker was killed by SIGKILL"
    play.say(0, m.Released(1, 21, 0.0))
    play.say(2, m.Released(1, 20, 0.0))
    actions = play.say(3, m.Released(1, 20, 0.0))
    plans = sent(actions, m.Plan)
    (assign,) = sent(actions, m.Assign).values()
    assert all(plan == assign.plan for plan in plans.values())
    plan = assign.plan
    assert plan is not None
    assert (plan.generation, plan.step, plan.sources, plan.newcomers) == (1, 20, {1: [2, 3]}, [1])
    assert plan.members == ["state:n0s0w0", "state:n1s0w5", "state:n2s0w2", "state:n3s0w3"]
    assert plan.keepers == {1: ["side:2"]}
    assert plan.buddies == [["side:1"], ["side:2"], ["side:3"], ["side:0"]]
    for rank, step in ((0, 21), (1, 20), (2, 20)):
        assert play.say(rank, m.Ready(1, step, f"d{step}", "", {"x": rank})) == []
    actions = play.say(3, m.Ready(1, 20, "d20", "", {}))
    assert len(sent(actions, m.Resume)) == 4
    assert play.state.ranks[1].live
    play.resumed()
    (finished,) = emitted(play.actions, events.FailoverFinished)
    assert finished.timings == {"x": 2}
    assert "healed in its own slot" in finished.reason
    assert play.state.stage is Stage.RUNNING


def test_in_set_up_newcomers_run_live_without_a_barrier() -> None:
    play = in_set_up(Job(nodes=2, spares=1))
    play.see(NodeLost(1, "gone"))
    actions = play.release(-1)
    (assign,) = sent(actions, m.Assign).values()
    assert assign.plan is not None
    assert (assign.plan.step, assign.plan.sources, assign.plan.keepers) == (-1, {1: []}, {1: ["side:0"]})
    assert len(sent(actions, m.Resume)) == 2
    assert play.state.ranks[1].live
    play.say(0, m.Resumed(1, {}, 0))
    assert play.state.stage is Stage.RUNNING


def test_messages_of_an_older_generation_are_dropped() -> None:
    play = Play(Job(nodes=3))
    play.warm(2)
    play.die(2)
    play.die(1)  # generation 2
    play.say(0, m.Released(1, 20, 0.0))
    assert play.state.awaiting == {0}
    play.warm(1)
    play.say(0, m.Released(2, 20, 0.0))
    assert play.state.stage is Stage.RESTORING
    play.say(1, m.Ready(1, 20, "d", "", {}))
    play.say(0, m.CommError(1, "x"))
    assert play.state.awaiting == {0, 1, 2}
    assert play.state.hint is None
    play.ready(20)
    play.say(0, m.Resumed(1, {}, 0))
    assert play.state.awaiting == {0, 1, 2}


def test_a_failure_while_restoring_starts_again_and_keeps_the_newcomer() -> None:
    play = Play(Job(nodes=3))
    play.warm(2)
    play.die(2)
    play.release(20)
    newcomer = play.state.ranks[2].worker
    play.warm(1)
    actions = play.die(1)
    assert sent(actions, m.Release).keys() == {"n0s0w0", newcomer}
    assert play.state.awaiting == {0}  # a newcomer is not asked
    actions = play.release(20)
    assert newcomer in sent(actions, m.Plan)
    (assign,) = sent(actions, m.Assign).values()
    assert assign.rank == 1
    assert play.state.plan is not None
    assert play.state.plan.newcomers == [1, 2]
    assert play.state.plan.sources == {1: [0], 2: [0]}


def test_a_failure_while_resuming_folds_into_the_same_failover() -> None:
    play = Play(Job(nodes=3))
    play.warm(2)
    play.die(2)
    play.release(20)
    play.ready(20)
    play.warm(1)
    play.die(1)
    play.release(20)
    play.ready(20)
    (finished,) = emitted(play.resumed(), events.FailoverFinished)
    assert finished.ranks == [1, 2]
    assert play.state.failovers == 1


def test_digests_that_differ_end_the_job_once_it_is_known_in_what() -> None:
    play = Play(Job(nodes=3))
    play.warm(1)
    play.die(1)
    play.release(20)
    for rank, digest in ((0, "aaaa"), (1, "bbbb"), (2, "aaaa")):
        actions = play.say(rank, m.Ready(1, 20, digest, "", {}))
    assert set(sent(actions, m.Explain).values()) == {m.Explain(20)}
    assert not sent(actions, m.Resume)
    for rank, digest in ((0, "a"), (1, "b"), (2, "a")):
        actions = play.say(rank, m.Tensors(20, {"model/w": digest, "model/b": "c"}))
    end = ending(actions)
    assert end.exit_code == 70
    assert end.reason.startswith(
        "generation 1 cannot go on: rank 1 (node 1) differs from ranks 0, 2 after update 20 in model/w. "
    )


def test_the_last_survivor_lost_ends_with_75() -> None:
    play = Play(Job(nodes=2, spares=2))
    play.see(NodeLost(0, "gone"))
    end = ending(play.see(NodeLost(1, "gone")))
    assert end.exit_code == 75
    assert "no copy of the model is left" in end.reason


# --- shards, votes, ways -----------------------------------------------------------------------------

TWO_SHARDS = ("a", "b", "a", "b")


def with_shards(names: tuple[str, ...] = TWO_SHARDS, redo: bool = False, step: int = 20, **job: int) -> Play:
    """A job in its training whose ranks hold these shards; the rule is made."""
    play = Play(Job(nodes=len(names), **job), step=0)  # type: ignore[arg-type]
    for rank, name in enumerate(names):
        play.say(rank, m.SetupDone(0, [], name))
    for rank, name in enumerate(names):
        play.say(rank, m.FirstUpdate(redo, name))
        if step:
            play.say(rank, m.Progress(step))
    return play


def test_the_rule_is_told_once_all_have_come_to_an_update() -> None:
    play = Play(Job(nodes=3), step=0)
    assert sent(play.say(0, m.FirstUpdate(False)), m.Rule) == {}
    assert sent(play.say(2, m.FirstUpdate(False)), m.Rule) == {}
    actions = play.say(1, m.FirstUpdate(False))
    assert set(sent(actions, m.Rule).values()) == {m.Rule(votes=False)}
    assert len(sent(actions, m.Rule)) == 3
    assert emitted(actions, events.Ruled)[0].shards == [[0, 1, 2]]
    assert play.state.votes is False


@pytest.mark.parametrize(("names", "redo"), [(TWO_SHARDS, False), (("", ""), True)])
def test_shards_and_steps_that_can_be_redone_make_a_job_vote(names: tuple[str, ...], redo: bool) -> None:
    assert with_shards(names, redo).state.votes is True


def test_names_of_set_up_count_until_all_have_told_those_of_their_first_update() -> None:
    play = Play(Job(nodes=3), step=0)
    for rank in range(3):
        play.say(rank, m.SetupDone(0, [], "part"))
    play.say(0, m.FirstUpdate(False, "whole"))
    play.say(1, m.FirstUpdate(False, "half"))
    assert set(play.state.shards().values()) == {"part"}
    play.say(2, m.FirstUpdate(False, "whole"))
    assert play.state.votes is True
    assert play.state.shards() == {0: "whole", 1: "half", 2: "whole"}


def test_one_that_failed_after_its_first_update_counts_and_its_newcomer_is_told_at_once() -> None:
    play = Play(Job(nodes=3, spares=1), step=0)
    play.say(0, m.FirstUpdate(False))
    play.warm(0)
    play.die(0)
    play.say(1, m.FirstUpdate(False))
    actions = play.say(2, m.FirstUpdate(True))
    assert set(sent(actions, m.Rule).values()) == {m.Rule(votes=True)}
    assert len(sent(actions, m.Rule)) == 2
    actions = play.release(0)
    (assign,) = sent(actions, m.Assign).values()
    assert assign.plan is not None
    assert assign.plan.votes is True
    play.ready(0)
    play.resumed()
    (told,) = sent(play.say(0, m.FirstUpdate(True)), m.Rule).values()
    assert told == m.Rule(votes=True)


def test_a_newcomer_on_its_way_is_told_a_rule_that_is_made_meanwhile() -> None:
    play = Play(Job(nodes=2, spares=1), step=0)
    play.say(0, m.FirstUpdate(False))
    play.warm(0)
    play.die(0)
    play.release(0)
    assert play.state.stage is Stage.RESTORING
    assert play.state.plan is not None
    assert play.state.plan.votes is None
    assert len(sent(play.say(1, m.FirstUpdate(False)), m.Rule)) == 2


def test_nobody_waits_for_a_rank_that_has_finished_without_an_update() -> None:
    play = Play(Job(nodes=2), step=0)
    play.say(0, m.FirstUpdate(False))
    assert len(sent(play.say(1, m.Finished(0)), m.Rule)) == 2


def test_nobody_waits_for_ever_for_ranks_that_do_not_update_but_their_loss_ends_the_job() -> None:
    play = Play(Job(nodes=3), step=0)
    for rank in (0, 1):
        play.say(rank, m.FirstUpdate(False))
    actions = play.wait(play.state.times.first_update + 1)
    assert set(sent(actions, m.Rule).values()) == {m.Rule(votes=False)}
    (notice,) = emitted(actions, events.Notice)
    assert "rank 2 never came to an update" in notice.text
    play.die(2)
    assert "This cannot be healed: rank 2 never came to an update" in ending(play.release(20)).reason


@pytest.mark.parametrize(("names", "healed"), [(("a", "a"), True), (("a", "b"), False)])
def test_one_that_was_only_late_is_healed_where_no_votes_are_needed(names: tuple[str, str], healed: bool) -> None:
    play = Play(Job(nodes=2, spares=1), step=0)
    play.say(0, m.FirstUpdate(False, names[0]))
    play.wait(play.state.times.first_update + 1)
    assert sent(play.say(1, m.FirstUpdate(False, names[1])), m.Rule) == {"n1s0w1": m.Rule(votes=False)}
    play.warm(1)
    play.die(1)
    actions = play.release(1)
    if healed:
        assert play.state.plan is not None
        assert (play.state.plan.step, play.state.plan.sources) == (1, {1: [0]})
    else:
        assert "too late for a vote" in ending(actions).reason


def one_never_updates(names: tuple[str, ...] = ("", ""), redo: bool = False) -> Play:
    """The last rank has not come to an update when the others have waited for it for too long."""
    play = Play(Job(nodes=len(names) + 1, spares=1), step=0)
    for rank, name in enumerate(names):
        play.say(rank, m.FirstUpdate(redo, name))
    limit = play.state.times.first_update
    assert sent(play.wait(limit - 1), m.Rule) == {}
    told = sent(play.wait(2), m.Rule)
    assert len(told) == len(names) + 1
    assert set(told.values()) == {m.Rule(votes=False)}
    return play


@pytest.mark.parametrize(("names", "redo"), [(("", ""), False), (TWO_SHARDS, False), (("", ""), True)])
def test_a_rank_that_never_updates_is_not_waited_for_for_ever(names: tuple[str, ...], redo: bool) -> None:
    play = one_never_updates(names, redo)
    last = len(names)
    (ruled,) = emitted(play.log, events.Ruled)
    assert ruled.reason == f"rank {last} has not come to an update within 60 s"
    notices = [notice.text for notice in emitted(play.log, events.Notice) if "would end the job" in notice.text]
    assert len(notices) == 1
    assert notices[0].startswith(f"rank {last} never came to an update")
    assert sent(play.wait(100), m.Rule) == {}


def test_a_failure_beside_a_rank_that_never_updates_ends_the_job() -> None:
    play = one_never_updates()
    play.die(1)
    play.say(0, m.Released(1, 20, 0.0))
    end = ending(play.say(2, m.Released(1, 0, 0.0)))
    assert end.exit_code == 70
    assert "rank 1" in end.reason
    assert "rank 2 never came to an update" in end.reason


def test_a_script_that_fails_beside_a_rank_that_never_updates_shows_its_traceback() -> None:
    play = one_never_updates()
    play.say(1, m.Failed(0, "ValueError: x", "Traceback", 1))
    play.say(0, m.Released(1, 20, 0.0))
    end = ending(play.say(2, m.Released(1, 0, 0.0)))
    assert (end.exit_code, end.traceback) == (1, "Traceback")


def test_one_that_comes_after_the_rule_is_told_the_same_and_failures_are_healed_again() -> None:
    play = one_never_updates()
    assert set(sent(play.say(2, m.FirstUpdate(False, "")), m.Rule).values()) == {m.Rule(votes=False)}
    play.warm(1)
    play.die(1)
    play.release(20)
    assert play.state.stage is Stage.RESTORING


@pytest.mark.parametrize(("name", "redo"), [("other", False), ("", True)])
def test_one_that_comes_too_late_for_a_vote_that_is_needed_leaves_the_job_unhealed(name: str, redo: bool) -> None:
    play = one_never_updates()
    actions = play.say(2, m.FirstUpdate(redo, name))
    assert set(sent(actions, m.Rule).values()) == {m.Rule(votes=False)}
    assert "too late for a vote" in emitted(actions, events.Notice)[0].text
    play.die(1)
    play.say(0, m.Released(1, 20, 0.0))
    assert "too late for a vote" in ending(play.say(2, m.Released(1, 20, 0.0))).reason


def test_the_wait_for_the_rule_starts_again_after_a_recovery() -> None:
    play = Play(Job(nodes=3, spares=1), step=0)
    play.say(0, m.FirstUpdate(False))
    play.wait(50)
    play.warm(1)
    play.die(1)
    play.release(0)
    play.ready(0)
    play.resumed()
    assert play.state.stage is Stage.RUNNING
    assert sent(play.wait(play.state.times.first_update - 1), m.Rule) == {}
    assert len(sent(play.wait(2), m.Rule)) == 3


def test_a_newcomer_is_served_by_replicas_of_its_shard_and_all_roll_forward() -> None:
    play = with_shards()
    play.warm(1)
    play.die(1)
    play.say(0, m.Released(1, 20, 0.0, voted=True))
    play.say(2, m.Released(1, 20, 0.0))
    actions = play.say(3, m.Released(1, 20, 0.0))
    assert play.state.plan is not None
    assert (play.state.plan.step, play.state.plan.sources) == (21, {1: [3]})
    assert (play.state.plan.way, play.state.plan.votes) == ("replay", True)
    for rank, digest in ((0, "a"), (1, "b"), (2, "a"), (3, "b")):
        actions = play.say(rank, m.Ready(1, 21, digest, digest, {}))
    assert len(sent(actions, m.Resume)) == 4
    (finished,) = emitted(play.resumed(), events.FailoverFinished)
    assert (finished.step, finished.way) == (21, "replay")


def test_a_second_failure_finds_survivors_that_have_not_rolled_forward_yet() -> None:
    play = with_shards(("a", "b") * 3)
    play.warm(1)
    play.die(1)
    play.say(0, m.Released(1, 20, 0.0, voted=True))
    play.release(20)
    assert play.state.plan is not None
    assert play.state.plan.step == 21
    play.warm(0)
    play.die(0)  # the only one that had passed the vote
    play.release(20)
    assert (play.state.plan.generation, play.state.plan.step) == (2, 21)
    assert play.state.plan.sources == {0: [2, 4], 1: [3, 5]}


def test_a_rank_that_stays_behind_where_all_vote_ends_the_job() -> None:
    play = with_shards()
    play.warm(1)
    play.die(1)
    play.release(20)
    play.say(0, m.Ready(1, 21, "", "", {}))
    end = ending(play.ready(20, ""))
    assert "rank 0 did not come to step 20" in end.reason


def test_the_only_rank_with_a_shard_ends_the_job_at_once() -> None:
    play = with_shards(("a", "b", "a"), spares=2)
    play.see(NodeLost(1, "gone"))
    end = ending(play.release(20))
    assert end.exit_code == 75
    assert "rank 1 was lost after update 20" in end.reason
    assert "resume from its last checkpoint" in end.reason


def test_all_replicas_of_a_shard_one_after_another_end_the_job() -> None:
    play = with_shards(spares=2)
    play.see(NodeLost(1, "gone"))
    play.release(20)
    assert play.state.stage is Stage.RESTORING
    play.see(NodeLost(3, "gone"))
    end = ending(play.release(20))
    assert "ranks 1, 3 were lost after update 20" in end.reason


def test_a_shard_lost_in_set_up_is_made_again() -> None:
    play = in_set_up(Job(nodes=2, spares=1))
    play.say(0, m.SetupDone(0, [], "a"))
    play.say(1, m.SetupDone(0, [], "b"))
    play.see(NodeLost(1, "gone"))
    assert play.state.plan is None
    play.release(-1)
    assert play.state.plan is not None
    assert (play.state.plan.step, play.state.plan.sources) == (-1, {1: []})
    assert play.state.stage is Stage.RESUMING


def test_a_shard_that_was_never_told_has_no_sources_where_there_are_several() -> None:
    play = in_set_up(Job(nodes=3, spares=1))
    play.say(0, m.SetupDone(0, [], "a"))
    play.say(1, m.SetupDone(0, [], "b"))
    play.see(NodeLost(2, "gone"))
    play.release(0)
    assert play.state.plan is not None
    assert (play.state.plan.step, play.state.plan.sources) == (0, {2: []})


@pytest.mark.parametrize(("digest", "goes_on"), [("d", True), ("x", False)])
def test_one_that_died_with_the_news_of_its_shard_makes_it_itself(digest: str, goes_on: bool) -> None:
    play = in_set_up(Job(nodes=3, spares=1))
    for rank in (0, 1):
        play.say(rank, m.SetupDone(0, [], "a"))
    play.see(NodeLost(2, "gone"))
    play.release(0)
    assert play.state.plan is not None
    assert (play.state.plan.step, play.state.plan.sources) == (0, {2: []})
    play.say(0, m.Ready(1, 0, "d", "", {}))
    play.say(1, m.Ready(1, 0, "d", "", {}))
    actions = play.say(2, m.Ready(1, 0, digest, "", {}))
    if goes_on:
        assert len(sent(actions, m.Resume)) == 3
    else:
        assert "rank 2 cannot be protected any further" in ending(actions).reason
        assert "No update has been applied" in ending(actions).reason


def test_once_all_had_come_to_an_update_no_newcomer_enters_in_the_set_up() -> None:
    """Survivors may not know it by themselves: subgroups need not have met yet."""
    play = with_shards(("a", "a"), step=0, spares=1)
    play.warm(1)
    play.die(1)
    play.release(-1)
    assert play.state.plan is not None
    assert (play.state.plan.step, play.state.plan.sources) == (0, {1: [0]})


def test_one_that_runs_its_set_up_again_comes_to_its_first_update_again() -> None:
    """The others must not apply updates, with the rule in hand, while it is in its set-up."""
    play = Play(Job(nodes=2, spares=1), step=0)
    play.say(1, m.FirstUpdate(False))
    play.warm(1)
    play.die(1)
    play.release(-1)
    play.say(0, m.Resumed(1, {}, 0))
    assert sent(play.say(0, m.FirstUpdate(False)), m.Rule) == {}
    play.say(1, m.SetupDone(1, []))
    assert len(sent(play.say(1, m.FirstUpdate(False)), m.Rule)) == 2


def test_redo_where_a_log_does_not_reach_back() -> None:
    play = with_shards(redo=True)
    play.warm(1)
    play.die(1)
    play.say(0, m.Released(1, 20, 0.0, replay_from=21))
    play.release(20)
    assert play.state.plan is not None
    assert (play.state.plan.step, play.state.plan.way) == (20, "redo")
    play.ready(20, "")
    (finished,) = emitted(play.resumed(), events.FailoverFinished)
    assert finished.way == "redo"
    assert "at step 20 by redo" in (story.line(finished) or "")


def test_neither_replay_nor_redo_ends_the_job() -> None:
    play = with_shards()
    play.warm(1)
    play.die(1)
    play.say(0, m.Released(1, 20, 0.0, replay_from=21))
    end = ending(play.release(20))
    assert end.exit_code == 70
    assert "rank 0 cannot be protected any further: the collectives of one step need more memory" in end.reason


def test_shards_are_told_in_one_line_and_those_without_replica_in_another() -> None:
    play = with_shards(("a", "b", "a", "c"), step=0)
    (ruled,) = emitted(play.log, events.Ruled)
    assert (story.line(ruled) or "").splitlines() == [
        "3 shards with 1 to 2 replicas: ranks 0 2 | 1 | 3; every update waits for a vote",
        "warning: ranks 1, 3 hold shards that no other rank has: the failure of one of them would end the job",
    ]
    (ruled,) = emitted(with_shards(("a", "a"), step=0).log, events.Ruled)
    assert story.line(ruled) is None
    assert story.full(ruled).startswith("updates wait for no vote: ")


# --- replicas compared while they train --------------------------------------------------------------


def tell(play: Play, step: int, digests: str) -> list[Action]:
    for rank, digest in enumerate(digests):
        play.say(rank, m.Digest(step, digest))
    return play.actions


def test_equal_digests_disturb_nobody() -> None:
    play = with_shards()
    assert tell(play, 21, "abab") == []
    assert (play.state.agreed, dict(play.state.digests)) == (21, {})


def test_a_difference_names_rank_tensor_and_step() -> None:
    play = Play(Job(nodes=4))
    tell(play, 24, "aaaa")
    asked = sent(tell(play, 25, "aaba"), m.Explain)
    assert len(asked) == 4
    for rank in range(4):
        play.say(rank, m.Progress(30))
        actions = play.say(rank, m.Tensors(25, {"model/w": "xyz"[rank == 2], "model/b": "c"}))
    end = ending(actions)
    assert end.exit_code == 70
    assert end.reason.startswith(
        "rank 2 (node 2) differs from ranks 0, 1, 3 after update 25 in model/w. They were equal after update 24. "
    )
    assert "from a checkpoint of update 24 or before" in end.reason


def test_of_two_replicas_nobody_is_right() -> None:
    play = with_shards()
    asked = sent(tell(play, 25, "abax"), m.Explain)
    assert asked.keys() == {"n1s0w1", "n3s0w3"}  # the others are replicas of each other, and equal
    play.say(1, m.Tensors(25, {"a": "1", "b": "1", "c": "1", "d": "1", "e": "1", "f": "1"}))
    end = ending(play.say(3, m.Tensors(25, {"a": "2", "b": "2", "c": "2", "d": "2", "e": "2"})))
    assert "rank 3 (node 3) differs from rank 1 (node 1) after update 25 in a, b, c, d and 2 more" in end.reason
    assert "nothing tells which of them is right" in end.reason
    assert "from a checkpoint of before that" not in end.reason
    assert "from a checkpoint before that" in end.reason


def test_who_cannot_say_more_ends_the_job_too() -> None:
    play = Play(Job(nodes=2))
    tell(play, 25, "ab")
    play.say(0, m.Tensors(25, {"a": "1"}))
    end = ending(play.say(1, m.Tensors(25, {})))
    assert "ranks 0, 1 are replicas, but do not hold the same state after update 25" in end.reason


def test_a_failure_or_silence_in_between_does_not_hide_it() -> None:
    play = Play(Job(nodes=2))
    tell(play, 25, "ab")
    assert "do not hold the same state" in ending(play.die(1)).reason
    play = Play(Job(nodes=2))
    tell(play, 25, "ab")
    assert "do not hold the same state" in ending(play.wait(60)).reason


def test_nor_does_the_end_of_the_training() -> None:
    play = Play(Job(nodes=2))
    for rank, digest in enumerate("ab"):
        play.say(rank, m.Digest(30, digest))
        actions = play.say(rank, m.Finished(30))
    assert not play.state.ended
    for rank, digest in enumerate("ab"):
        actions = play.say(rank, m.Tensors(30, {"w": digest}))
    assert "after update 30 in w" in ending(actions).reason


def test_steps_that_a_failed_rank_did_not_come_to_are_dropped() -> None:
    play = Play(Job(nodes=2))
    for step in range(21, 61):
        play.say(0, m.Digest(step, "a"))
    assert len(play.state.digests) == 8


def test_ranks_know_how_often() -> None:
    play = Play(Job(nodes=1, check_every=7), start=False)
    play.join(0)
    (assign,) = sent(play.warm(0), m.Assign).values()
    assert assign.env["TORCHPASS_CHECK_EVERY"] == "7"


# --- what moves where ------------------------------------------------------------------------------


def test_a_lost_node_moves_as_a_whole() -> None:
    play = Play(Job(nodes=2, nproc_per_node=2, spares=1))
    actions = play.see(NodeLost(0, "power"))
    assert [a for a in actions if isinstance(a, FenceNode)]
    assert {e.rank for e in emitted(actions, events.RankFailed)} == {0, 1}
    assigned = sent(play.release(20), m.Assign)
    assert [(a.rank, a.env["LOCAL_RANK"]) for a in assigned.values()] == [(0, "0"), (1, "1")]
    assert all(name.startswith("n2") for name in assigned)
    assert {a.env["GROUP_RANK"] for a in assigned.values()} == {"0"}


def test_out_of_spares() -> None:
    play = Play(Job(nodes=3, spares=1))
    play.see(NodeLost(0, "power"))
    play.heal(20)
    play.see(NodeLost(1, "power"))
    end = ending(play.release(21))
    assert end.exit_code == 75
    for words in ("node 1", "rank 1", "1 spare node", "--spares 2", "no spare is left"):
        assert words in end.reason


def test_an_idle_spare_dies_and_nobody_is_disturbed() -> None:
    play = Play(Job(nodes=3, spares=2))
    actions = play.see(NodeLost(3, "power"))
    assert emitted(actions, events.SpareLost) == [events.SpareLost(3, "power", 1)]
    assert not [a for a in actions if isinstance(a, Send)]
    play.see(NodeLost(0, "power"))
    assert list(sent(play.release(20), m.Assign)) == ["n4s0w4"]


def test_an_idle_spare_that_is_a_buddy_dies_and_nobody_waits_for_it() -> None:
    play = Play(Job(nodes=2, spares=2))
    assert [play.state.ranks[rank].buddies for rank in (0, 1)] == [(1, 2), (0, 2)]
    actions = play.see(NodeLost(2, "power"))
    assert list(sent(actions, m.BuddyLost).values()) == [m.BuddyLost("side:2")] * 2
    assert not emitted(actions, events.FailoverStarted)


def test_an_idle_spare_that_was_the_last_buddy_is_replaced_as_buddy() -> None:
    play = Play(Job(nodes=1, nproc_per_node=2, spares=1))
    assert play.state.ranks[0].buddies == (1,)
    actions = play.see(NodeLost(1, "power"))
    assert len(sent(actions, m.Release)) == 2
    plan = next(iter(sent(play.release(20), m.Plan).values()))
    assert plan.buddies == [["side:0"], ["side:0"]]
    assert plan.newcomers == []
    play.ready(20)
    (finished,) = emitted(play.resumed(), events.FailoverFinished)
    assert finished.ranks == []


def test_keepers_are_remembered_across_changes_of_buddies() -> None:
    play = Play(Job(nodes=3, spares=1))
    assert play.state.ranks[0].keepers == (1,)
    play.see(NodeLost(1, "power"))
    play.release(20)
    assert play.state.ranks[0].buddies == (2,)
    play.ready(20)
    play.resumed()
    assert play.state.ranks[0].keepers == (2,)
    assert play.state.ranks[2].keepers == (3, 0)  # rank 1 runs on node 3 now
    assert play.state.ranks[1].keepers == (0, 2)  # moved to node 3: buddy 0; node 2 may still hold its last


def test_the_same_step_again_moves_to_a_spare_and_then_ends_with_the_traceback() -> None:
    play = Play(Job(nodes=2, spares=1))
    failure = m.Failed(20, "ValueError: bad", "Traceback: bad", 3)
    for attempt, place in ((1, (1, 0)), (2, (2, 0))):
        play.warm(*play.state.ranks[1].place)
        actions = play.say(1, failure)
        assert [a.worker for a in actions if isinstance(a, KillWorker)]
        play.heal(20)
        assert play.state.ranks[1].place == place, attempt
    play.warm(2)
    play.say(1, failure)
    end = ending(play.release(20))
    assert (end.exit_code, end.traceback) == (3, "Traceback: bad")
    assert "3 times at the same step" in end.reason


def test_the_same_step_again_without_a_spare_ends() -> None:
    play = Play(Job(nodes=2))
    play.warm(1)
    play.die(1)
    play.heal(20)
    play.warm(1)
    play.die(1)
    end = ending(play.release(20))
    assert end.exit_code == 75
    assert "2 times at the same step" in end.reason


def test_another_step_is_not_a_repetition() -> None:
    play = Play(Job(nodes=2))
    for step in range(20, 26):
        play.warm(1)
        play.die(1)
        play.heal(step)
        assert play.state.ranks[1].place == (1, 0)


def test_failed_and_exited_are_one_failure() -> None:
    play = Play(Job(nodes=2))
    worker = play.state.ranks[1].worker
    assert worker is not None
    play.say(1, m.Failed(20, "E: x", "tb", 1))
    assert play.see(Exited(1, worker, 1)) == []
    assert play.state.generation == 1


def test_a_bug_on_all_ranks_ends_at_once_with_the_first_traceback() -> None:
    play = Play(Job(nodes=3, spares=1))
    play.say(1, m.Failed(20, "E: one", "tb 1", 1))
    play.now += 0.1
    play.say(0, m.Failed(20, "E: zero", "tb 0", 1))
    end = ending(play.say(2, m.Failed(20, "E: two", "tb 2", 1)))
    assert (end.exit_code, end.traceback) == (1, "tb 1")
    assert "every rank failed" in end.reason


def test_a_single_rank_that_raises_ends_the_job() -> None:
    end = ending(Play(Job(nodes=1)).say(0, m.Failed(20, "E: x", "tb", 1)))
    assert (end.exit_code, end.traceback) == (1, "tb")


def test_exceptions_in_separate_recoveries_are_not_a_bug_on_all_ranks() -> None:
    play = Play(Job(nodes=2))
    for rank, step in ((0, 20), (1, 21)):
        play.warm(rank)
        play.say(rank, m.Failed(step, "E: x", "tb", 1))
        play.heal(step)


def test_unprotected_ends_the_job_with_its_reason() -> None:
    end = ending(Play(Job(nodes=2)).say(1, m.Unprotected("sparse all-reduce")))
    assert end.exit_code == 70
    assert "sparse all-reduce" in end.reason


# --- time ----------------------------------------------------------------------------------------------


def test_a_failed_collective_waits_for_the_news_who_died() -> None:
    play = Play(Job(nodes=2, spares=1))
    play.say(0, m.CommError(0, "reset by peer"))
    assert not sent(play.wait(0.5), m.Release)
    assert len(sent(play.wait(1.0), m.Release)) == 2
    assert len(sent(play.release(20), m.Plan)) == 2
    assert play.state.plan is not None
    assert play.state.plan.newcomers == []
    play.ready(20)
    play.resumed()
    assert play.state.stage is Stage.RUNNING


def test_a_failed_collective_whose_cause_is_found_makes_one_recovery() -> None:
    play = Play(Job(nodes=2, spares=1))
    play.say(0, m.CommError(0, "reset by peer"))
    play.see(NodeLost(1, "power"))
    play.heal(20)
    play.wait(3)
    assert play.state.generation == 1


def test_collectives_that_never_heal_end_the_job() -> None:
    play = Play(Job(nodes=2, spares=1))
    for _ in range(membership.HINT_ROUNDS):
        play.say(0, m.CommError(play.state.generation, "no route"))
        play.wait(1.5)
        play.heal(20)
    play.say(0, m.CommError(play.state.generation, "no route"))
    end = ending(play.wait(1.5))
    assert end.exit_code == 70
    assert "no route" in end.reason


def test_a_survivor_that_does_not_let_go_is_killed_and_replaced() -> None:
    play = Play(Job(nodes=3))
    play.warm(2)
    play.die(2)
    play.release(20, 0)
    stuck = play.state.ranks[1].worker
    actions = play.wait(15.5)
    assert [a.worker for a in actions if isinstance(a, KillWorker)] == [stuck]
    assert play.state.generation == 2
    assert play.state.awaiting == {0}


def test_a_newcomer_that_is_not_ready_in_time_is_replaced() -> None:
    play = Play(Job(nodes=3))
    play.warm(2)
    play.die(2)
    play.release(20)
    stuck = play.state.ranks[2].worker
    actions = play.wait(61)
    assert [a.worker for a in actions if isinstance(a, KillWorker)] == [stuck]


def test_a_slow_set_up_extends_what_a_newcomer_may_take() -> None:
    play = Play(Job(nodes=2))
    play.warm(1)
    play.die(1)
    play.release(20)
    play.ready(20)
    play.resumed()
    play.wait(100)
    play.say(1, m.SetupDone(1, []))  # 100 s after its assignment
    play.warm(1)
    play.die(1)
    play.release(21)
    assert not [a for a in play.wait(250) if isinstance(a, KillWorker)]
    assert [a for a in play.wait(15) if isinstance(a, KillWorker)]


def test_a_slot_without_warm_worker_is_given_up_for_a_spare() -> None:
    play = Play(Job(nodes=2, spares=1))
    play.die(1)
    play.release(20)
    assert play.state.stage is Stage.PLACING
    play.wait(121)
    play.release(20)
    assert play.state.ranks[1].place == (2, 0)
    assert play.state.stage is Stage.RESTORING


def broken(play: Play, node: int, returncode: int = 7) -> list[Action]:
    return play.see(SlotBroken(node, 0, "3 in a row ended before they were ready", returncode))


def test_a_slot_that_is_reported_broken_is_left_at_once() -> None:
    play = Play(Job(nodes=2, spares=1))
    play.die(1)
    play.release(20)
    assert play.state.stage is Stage.PLACING
    broken(play, 1)
    play.release(20)
    assert play.state.ranks[1].place == (2, 0)
    assert play.state.stage is Stage.RESTORING


def test_a_slot_that_is_reported_broken_while_survivors_let_go_is_left_in_the_same_recovery() -> None:
    play = Play(Job(nodes=2, spares=1))
    play.die(1)
    assert not sent(broken(play, 1), m.Release)
    play.release(20)
    assert (play.state.ranks[1].place, play.state.generation) == ((2, 0), 1)


def test_a_broken_slot_beside_a_living_rank_disturbs_nobody() -> None:
    play = Play(Job(nodes=2, spares=1))
    actions = broken(play, 1)
    assert not [a for a in actions if isinstance(a, Send)]
    assert "slot 0 has no warm worker: 3 in a row" in emitted(actions, events.Notice)[0].text
    play.die(1)
    play.warm(1)  # its supervisor has tried again
    play.heal(20)
    assert play.state.ranks[1].place == (1, 0)


def test_a_broken_spare_is_not_chosen_unless_it_comes_round() -> None:
    play = Play(Job(nodes=2, spares=2))
    broken(play, 2)
    play.see(NodeLost(0, "power"))
    play.release(20)
    assert play.state.ranks[0].place == (3, 0)
    play = Play(Job(nodes=2, spares=1))
    broken(play, 2)
    play.warm(2)
    play.see(NodeLost(0, "power"))
    play.release(20)
    assert play.state.ranks[0].place == (2, 0)


@pytest.mark.parametrize("early", [False, True])
def test_a_command_that_never_becomes_a_worker_ends_the_job_with_its_code(early: bool) -> None:
    """Also where the news comes before the last supervisor has joined and it is known who trains."""
    play = Play(Job(nodes=2, spares=1), start=False)
    actions: list[Action] = []
    for node in range(3):
        actions += play.join(node)
        if early and node < 2:
            actions += broken(play, node)
    for node in range(3):
        actions += broken(play, node)
    end = ending(actions)
    assert end.exit_code == 7
    assert "never becomes a worker" in end.reason


def test_a_warm_worker_that_comes_later_is_waited_for() -> None:
    play = Play(Job(nodes=2))
    play.die(1)
    play.release(20)
    assert play.state.stage is Stage.PLACING
    (assign,) = sent(play.warm(1), m.Assign).values()
    assert assign.rank == 1


def test_a_silent_node_is_lost_but_not_when_the_coordinator_itself_slept() -> None:
    play = Play(Job(nodes=2, spares=1))
    play.see(Tick())
    play.see(Tick(), after=60.0)
    assert play.state.stage is Stage.RUNNING
    for _ in range(22):
        play.now += 0.5
        play.see(Heard(0))
        play.see(Heard(2))
        play.see(Tick())
    assert play.state.stage is Stage.RELEASING
    assert play.state.up_nodes() == [0, 2]


# --- faults, modules, notices --------------------------------------------------------------------------


def test_injected_faults_fire_once_and_go_to_whom_they_concern() -> None:
    texts = (
        "rank=1 step=20 phase=backward kill",
        "node=1 phase=recovery:restore kill",
        "rank=0 phase=setup kill",
    )
    job = Job(nodes=2, nproc_per_node=2, faults=tuple(map(faults.parse, texts)))
    play = Play(job, start=False)
    for node in range(2):
        play.join(node)
    given = [sent(play.warm(node, slot), m.Assign) for node in range(2) for slot in range(2)]
    assert [[n for n, _ in next(iter(a.values())).faults] for a in given] == [[2], [0], [1], []]
    assert sent(play.say(1, m.Injecting(0)), m.InjectAck) == {"n0s1w1": m.InjectAck(0, True)}
    assert sent(play.say(1, m.Injecting(0)), m.InjectAck) == {"n0s1w1": m.InjectAck(0, False)}
    assert sent(play.say(1, m.Injecting(9)), m.InjectAck) == {"n0s1w1": m.InjectAck(9, False)}
    for rank in range(4):
        play.say(rank, m.SetupDone(0, []))
    play.now += 0.25
    play.warm(0, 1)
    play.die(1)
    (assign,) = sent(play.release(20), m.Assign).values()
    assert assign.faults == []
    play.ready(20)
    (finished,) = emitted(play.resumed(), events.FailoverFinished)
    assert finished.stages["detect"] == pytest.approx(0.25)
    assert finished.seconds == pytest.approx(0.25)


def test_modules_go_to_warm_workers_now_and_later_and_once() -> None:
    play = in_set_up(Job(nodes=2, spares=1))
    assert sent(play.say(0, m.SetupDone(0, ["a", "b"])), m.Warm) == {"n2s0w2": m.Warm(["a", "b"])}
    assert sent(play.say(1, m.SetupDone(0, ["b", "a"])), m.Warm) == {}
    assert sent(play.say(1, m.SetupDone(0, ["c"])), m.Warm) == {"n2s0w2": m.Warm(["c"])}
    assert sent(play.warm(0), m.Warm) == {"n0s0w3": m.Warm(["a", "b", "c"])}


def test_the_same_notice_of_several_ranks_is_one() -> None:
    play = Play(Job(nodes=2))
    assert emitted(play.say(0, m.Notice("warning", "x")), events.Notice) == [events.Notice("warning", "x", 0)]
    assert play.say(1, m.Notice("warning", "x")) == []


def test_what_comes_from_a_worker_that_was_given_up_is_ignored() -> None:
    play = Play(Job(nodes=2))
    worker = play.state.ranks[1].worker
    assert worker is not None
    play.die(1)
    for message in (m.Finished(20), m.Failed(1, "e", "t", 1), m.WarmReady(1, "x"), m.Unprotected("y")):
        assert play.see(Said(1, 0, worker, message)) == []
    assert play.see(Said(0, 0, "n1s0w9", m.Finished(1))) == []  # unknown worker


def test_refusals() -> None:
    play = Play(Job(nodes=2, nproc_per_node=2, spares=1))
    play.see(NodeLost(2, "power"))
    fresh = membership.initial(play.job, "h:1", "r", 0.0)
    assert membership.refusal(fresh, 0, 2, m.PROTOCOL) is None
    assert "slots" in (membership.refusal(fresh, 0, 1, m.PROTOCOL) or "")
    assert "protocol 7" in (membership.refusal(fresh, 0, 2, 7) or "")
    assert "already" in (membership.refusal(play.state, 0, 2, m.PROTOCOL) or "")
    assert "given up" in (membership.refusal(play.state, 2, 2, m.PROTOCOL) or "")
    assert "not part" in (membership.refusal(play.state, 3, 2, m.PROTOCOL) or "")


def test_without_the_store_training_goes_on_and_the_next_failure_ends_the_job_at_once() -> None:
    play = Play(Job(nodes=2, spares=1))
    assert play.see(StoreLost()) == []
    actions = play.die(1)
    [end] = [action for action in actions if isinstance(action, End)]
    assert end.exit_code == 70
    assert "killed by SIGKILL" in end.reason
    assert "store has ended" in end.reason


def test_a_spare_that_dies_without_the_store_disturbs_nobody() -> None:
    play = Play(Job(nodes=1, spares=1))
    play.see(StoreLost())
    play.see(NodeLost(1, "connection closed"))
    assert play.state.stage is Stage.RUNNING


def test_a_store_that_is_lost_in_a_recovery_ends_the_job() -> None:
    play = Play(Job(nodes=2, spares=1))
    play.die(1)
    [end] = [action for action in play.see(StoreLost()) if isinstance(action, End)]
    assert end.exit_code == 70


def test_one_node_that_is_told_to_end_is_lost_and_two_end_the_job() -> None:
    play = Play(Job(nodes=3, spares=1))
    assert play.see(Left(1, "SIGTERM")) == []
    play.now += play.state.times.stop_grace / 2
    actions = play.see(Tick())
    assert emitted(actions, events.NodeDown) == [events.NodeDown(1, "its supervisor was told to end by SIGTERM", [1])]
    assert list(sent(play.release(20), m.Assign)) == ["n3s0w3"]
    play = Play(Job(nodes=3, spares=1))
    play.see(Left(1, "SIGTERM"))
    end = ending(play.see(Left(3, "SIGTERM")))
    assert (end.exit_code, end.reason) == (143, "stopped by SIGTERM")


def test_the_only_node_that_is_told_to_end_ends_the_job() -> None:
    assert ending(Play(Job(nodes=1, nproc_per_node=2)).see(Left(0, "SIGUSR1"))).exit_code == 138


# --- protection ----------------------------------------------------------------------------------------

FACTS = lint.Facts(script="train.py", step=1, world_size=2, buddies=9)
LARGE = lint.Facts(script="train.py", step=3, world_size=2, large=(lint.Large("outputs", 4_200_000, "train.py:57"),))


def test_protection_is_an_event_and_buddies_are_counted_here() -> None:
    play = Play(Job(nodes=2, spares=1))
    (event,) = emitted(play.say(0, m.Protection(FACTS)), events.Protection)
    assert (event.rank, event.step) == (0, 1)
    assert event.lines[0] == "train.py as it is: nothing"
    assert emitted(play.say(1, m.Protection(FACTS)), events.Protection) == []
    alone = Play(Job(nodes=1, nproc_per_node=2))
    (event,) = emitted(alone.say(0, m.Protection(FACTS)), events.Protection)
    assert [finding.topic for finding in event.findings if finding.level == "note"] == ["no buddy"]


def test_what_is_not_protected_is_told_and_the_job_goes_on() -> None:
    play = Play(Job(nodes=2))
    play.say(0, m.Protection(FACTS))
    (event,) = emitted(play.say(0, m.Protection(LARGE)), events.Protection)
    assert event.lines == [lint.one_line(event.findings[0])]
    assert not play.state.ended


@pytest.mark.parametrize("rank", [0, 1])
def test_strict_ends_the_job_once_something_is_not_protected(rank: int) -> None:
    play = Play(Job(nodes=2, strict=True))
    play.say(rank, m.Protection(FACTS))
    assert not play.state.ended
    end = play.say(rank, m.Protection(LARGE))[-1]
    assert isinstance(end, End)
    assert end.exit_code == 2
    assert end.reason.startswith(f"--strict: rank {rank}: NOT protected: `outputs` (4.2 MB)")
    assert "\n" not in end.reason


def test_ranks_that_train_apart_are_told_and_under_strict_end_the_job() -> None:
    def facts(weights: str) -> m.Protection:
        return m.Protection(lint.Facts(script="train.py", step=1, world_size=3, weights=weights))

    for strict in (False, True):
        play = Play(Job(nodes=3, strict=strict))
        assert "unprotected" not in levels(play.say(0, facts("a")))
        assert levels(play.say(2, facts("a"))) == []
        last = play.say(1, facts("b"))
        assert [e.exit_code for e in last if isinstance(e, End)] == ([2] if strict else [])
        assert levels(last) == ["unprotected"]
        assert play.state.ended == strict


def levels(actions: list[Action]) -> list[str]:
    found = emitted(actions, events.Protection)
    return [finding.level for event in found for finding in event.findings if finding.level == "unprotected"]


def test_ranks_know_that_the_job_is_strict() -> None:
    play = Play(Job(nodes=1, strict=True), start=False)
    play.join(0)
    (assign,) = sent(play.warm(0), m.Assign).values()
    assert assign.env["TORCHPASS_STRICT"] == "1"

"""The main job on real Slurm daemons: nodes die, training goes on, and ends with the numbers of the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster import Bed
from tests.e2e.conftest import Run
from tests.e2e_slurm.conftest import GPT, submit
from tpwrap.core import events

pytestmark = pytest.mark.timeout(300)
Oracle = Callable[..., Run]


def assert_drained(bed: Bed, node: str, job: int) -> None:
    bed.wait(lambda: "DRAIN" in bed.node(node)["State"], f"{node} is drained", 10)
    found = bed.node(node)
    assert f"torchpass job {job}: " in found["Reason"], found
    assert " step " in found["Reason"], found


def assert_stays_out(bed: Bed, node: str) -> None:
    """Drained and down: it does not come back by itself."""
    state = bed.node(node)["State"]
    assert "DOWN" in state, state
    assert "DRAIN" in state, state


def assert_not_drained(bed: Bed, *nodes: str) -> None:
    for node in nodes:
        assert "DRAIN" not in bed.node(node)["State"], bed.node(node)


def test_a_node_dies(bed: Bed, undisturbed: Oracle) -> None:
    job = submit(bed)
    job.wait_step(20)
    victim = job.node_of(2)
    bed.kill(victim)
    assert_drained(bed, victim, job.id)
    shown = job.end()
    assert_stays_out(bed, victim)
    job.assert_equal(undisturbed("gpt-slurm", GPT), {2, 3})
    assert "spares=1/2 failovers=1 finished" in shown["Comment"]
    assert f"{victim}->" in shown["Comment"]
    assert "ranks 2,3 step " in shown["Comment"]
    assert_not_drained(bed, *(node for node in bed.nodes if node != victim))


def test_a_worker_dies(bed: Bed, undisturbed: Oracle) -> None:
    """It is healed in its own slot: no spare is spent, nothing is drained."""
    job = submit(bed)
    job.wait_step(20)
    node = job.node_of(1)
    bed.run(["kill", "-9", str(job.run.first_pid(1))], user="root", node=node)
    shown = job.end()
    job.assert_equal(undisturbed("gpt-slurm", GPT), {1})
    assert "spares=2/2 failovers=1 finished" in shown["Comment"]
    assert f"rank 1 healed on {node}" in shown["Comment"]
    assert_not_drained(bed, *bed.nodes)


@pytest.mark.parametrize("carrier", [False, True])
def test_a_link_is_cut(carrier: bool, bed: Bed, undisturbed: Oracle) -> None:
    job = submit(bed)
    job.wait_step(20)
    victim = job.node_of(2)
    bed.cut(victim, carrier)
    assert_drained(bed, victim, job.id)
    job.end()
    assert_stays_out(bed, victim)
    job.assert_equal(undisturbed("gpt-slurm", GPT), {2, 3})


def test_the_node_of_rank_0_dies(bed: Bed, undisturbed: Oracle) -> None:
    job = submit(bed)
    job.wait_step(20)
    victim = job.node_of(0)
    assert victim != "n1"  # the batch script's node is a spare
    bed.kill(victim)
    assert_drained(bed, victim, job.id)
    job.end()
    assert_stays_out(bed, victim)
    job.assert_equal(undisturbed("gpt-slurm", GPT), {0, 1})


def test_a_frozen_node(bed: Bed, undisturbed: Oracle) -> None:
    """Its kernel answers, its processes do not. When it thaws it is told that it was given up."""
    job = submit(bed)
    job.wait_step(20)
    victim = job.node_of(2)
    bed.freeze(victim)
    assert_drained(bed, victim, job.id)
    bed.thaw(victim)
    job.end()
    job.assert_equal(undisturbed("gpt-slurm", GPT), {2, 3})


def test_a_node_and_a_spare_at_once(bed: Bed, undisturbed: Oracle) -> None:
    job = submit(bed)
    job.wait_step(20)
    victims = [job.node_of(2), next(spare for spare in job.spares() if spare != "n1")]
    for victim in victims:
        bed.kill(victim)
    job.end()
    job.assert_equal(undisturbed("gpt-slurm", GPT), {2, 3})


def test_two_training_nodes_at_once(bed: Bed, undisturbed: Oracle) -> None:
    job = submit(bed, nodes=3, tasks=1, spares=2)
    job.wait_step(20)
    victims = [job.node_of(1), job.node_of(2)]
    for victim in victims:
        bed.kill(victim)
    for victim in victims:
        assert_drained(bed, victim, job.id)
    job.end()
    job.assert_equal(undisturbed("gpt-slurm-3", GPT, nodes=3), {1, 2}, ranks=3)


def test_a_spare_dies_idle_and_then_a_node(bed: Bed, undisturbed: Oracle) -> None:
    job = submit(bed)
    job.wait_step(10)
    spare = next(spare for spare in job.spares() if spare != "n1")
    bed.kill(spare)
    bed.wait(lambda: job.events(events.SpareLost), "the spare's loss is seen", 20)
    assert not job.events(events.FailoverStarted)
    victim = job.node_of(2)
    bed.kill(victim)
    shown = job.end()
    job.assert_equal(undisturbed("gpt-slurm", GPT), {2, 3})
    assert f"spare {spare} lost" in shown["Comment"]
    assert "spares=0/2" in shown["Comment"]


def test_the_batch_host_dies(bed: Bed, undisturbed: Oracle) -> None:
    """The script and srun are gone with it; training goes on to its end, and the job does not stay behind empty."""
    job = submit(bed, tpwrap_options="--coordinator n2")
    job.wait_step(20)
    assert sorted(job.spares()) == ["n1", "n2"]
    bed.kill("n1")
    job.end("CANCELLED")
    job.assert_equal(undisturbed("gpt-slurm", GPT), set())
    assert "training has finished, but the batch script was lost" in (job.run_dir / "launcher.log").read_text()


def test_the_coordinators_node_dies(bed: Bed) -> None:
    """No other process can decide yet, so the job is lost; it must end, though, and free its nodes."""
    job = submit(bed, tpwrap_options="--coordinator n2")
    job.wait_step(20)
    bed.kill("n2")
    shown = job.end("FAILED")
    assert shown["ExitCode"] == "76:0"
    assert "the coordinator is lost" in job.output


@pytest.mark.xfail(reason="the coordinator cannot move to another supervisor yet", strict=True)
def test_training_survives_the_coordinators_node(bed: Bed, undisturbed: Oracle) -> None:
    job = submit(bed)
    job.wait_step(20)
    bed.kill("n1")
    job.end("CANCELLED", 20)
    job.assert_equal(undisturbed("gpt-slurm", GPT), set())


def test_batch_host_and_coordinator_die_together(bed: Bed) -> None:
    """Nothing is left that could end the job but the supervisors of the other nodes: it is requeued."""
    job = submit(bed)
    job.wait_step(20)
    bed.kill("n1")
    bed.wait(lambda: bed.job(job.id)["Restarts"] == "1", "the job is requeued", 60)
    bed.run(["scancel", str(job.id)])


def test_one_task_a_node(bed: Bed, undisturbed: Oracle) -> None:
    """Then tpwrap starts the node's ranks itself."""
    job = submit(bed, tasks=1, tpwrap_options="--nproc-per-node 2")
    job.wait_step(20)
    victim = job.node_of(0)
    bed.kill(victim)
    job.end()
    job.assert_equal(undisturbed("gpt-slurm", GPT), {0, 1})


def test_a_node_that_was_given_up_comes_back_and_fails_again(bed: Bed, undisturbed: Oracle) -> None:
    job = submit(bed)
    job.wait_step(20)
    victim = job.node_of(2)
    bed.cut(victim)
    assert_drained(bed, victim, job.id)
    bed.heal(victim)
    bed.wait(lambda: job.events(events.FailoverFinished), "training goes on", 30)
    bed.kill(victim)
    shown = job.end()
    job.assert_equal(undisturbed("gpt-slurm", GPT), {2, 3})
    assert "failovers=1 finished" in shown["Comment"]

"""Jobs that are stopped on purpose: they end at once and cleanly, and no node is taken for a failed one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster import Bed
from tests.e2e.conftest import Run
from tests.e2e_slurm.conftest import GPT, Job, submit
from tests.e2e_slurm.test_training import assert_not_drained
from tpwrap.core import events

pytestmark = pytest.mark.timeout(300)
LONG = [word if word != "120" else "100000" for word in GPT]


def assert_nothing_runs(bed: Bed) -> None:
    for node in bed.nodes:
        left = bed.run(["pgrep", "--uid", "alice", "--list-full"], user="root", node=node, check=False).stdout
        assert left == "", f"{node}:\n{left}"


def ended(job: Job, code: int) -> None:
    """By a verdict of that exit code; no failover has begun on the way."""
    found = job.events(events.JobEnded)
    assert [event.exit_code for event in found] == [code], job.output
    assert not job.events(events.FailoverFinished)


def test_scancel(bed: Bed) -> None:
    job = submit(bed, script=LONG)
    job.wait_step(5)
    bed.run(["scancel", str(job.id)])
    shown = job.end("CANCELLED", 30)
    bed.wait(lambda: "COMPLETING" not in bed.run(["squeue", "-h", "-o", "%T"]).stdout, "the job is gone", 30)
    assert_nothing_runs(bed)
    assert_not_drained(bed, *bed.nodes)
    ended(job, 143)
    assert "failovers=0" in shown["Comment"]


@pytest.mark.parametrize("signal", ["TERM", "USR1"])
def test_a_signal_before_the_time_limit(signal: str, bed: Bed) -> None:
    """--signal=…@seconds sends it to all processes of the step, as scancel --signal does."""
    job = submit(bed, script=LONG)
    job.wait_step(5)
    bed.run(["scancel", f"--signal={signal}", str(job.id)])
    job.end("FAILED", 30)
    ended(job, {"TERM": 143, "USR1": 138}[signal])
    assert f"stopped by SIG{signal}" in job.output
    assert_nothing_runs(bed)
    assert_not_drained(bed, *bed.nodes)
    assert bed.job(job.id)["ExitCode"].startswith({"TERM": "143", "USR1": "138"}[signal])


def test_a_script_that_makes_use_of_the_signal_goes_on(bed: Bed) -> None:
    script = bed.share / "script.py"
    script.write_text(
        "import signal, time\n"
        "seen = []\n"
        "signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))\n"
        "print('ready', flush=True)\n"
        "while not seen:\n"
        "    time.sleep(0.05)\n"
        "time.sleep(1)\n"
        "print('saved', flush=True)\n"
    )
    job = submit(bed, script=[str(script)])
    bed.wait(lambda: job.output.count("] ready") == 4, "all ranks are ready", 60)
    bed.run(["scancel", "--signal=USR1", str(job.id)])
    job.end("COMPLETED", 60)
    assert job.output.count("] saved") == 4


def test_a_bug_of_the_script_fails_the_job(bed: Bed) -> None:
    script = bed.share / "script.py"
    script.write_text("raise ValueError('this is the bug')\n")
    job = submit(bed, script=[str(script)])
    shown = job.end("FAILED", 90)
    assert job.output.count("Traceback (most recent call last)") == 1
    assert "ValueError: this is the bug" in job.output
    assert shown["ExitCode"] == "1:0"
    assert_not_drained(bed, *bed.nodes)


def test_a_signal_to_one_node_alone_is_the_loss_of_that_node(bed: Bed, undisturbed: Callable[..., Run]) -> None:
    """A host that is shut down ends its processes politely; the rest of the job goes on."""
    job = submit(bed)
    job.wait_step(20)
    node = job.node_of(2)
    supervisor = next(e.pid for e in job.events(events.NodeJoined) if e.name == node)
    bed.run(["kill", "-TERM", str(supervisor)], user="root", node=node)
    job.end()
    job.assert_equal(undisturbed("gpt-slurm", GPT), {2, 3})
    assert "because it answers: its supervisor was told to end by SIGTERM" in job.output
    assert_not_drained(bed, *bed.nodes)

"""How long the helper lives: exactly as long as its job on that node. With the plugin as a site has it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Bed
from tests.slurm_plugin.building import HERE, PLUGIN
from tests.slurm_plugin.plugin_bed import VERSIONS, plugin_bed

ATTACKER = HERE / "attacker.py"
NODES = ["n1", "n2", "n3", "n4"]


@pytest.fixture(scope="module", params=VERSIONS)
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    scripts = {"prolog": PLUGIN / "prolog", "epilog": PLUGIN / "epilog"}
    with plugin_bed(request.param, nodes=4, **scripts) as opened:
        yield opened


def submit(bed: Bed, spares: int = 1, script: str = "sleep 1000") -> int:
    """A job with a helper on every node: on n1, n2 and the spares, as Slurm takes the nodes in order."""
    job = bed.sbatch(script, "-o", "/dev/null", f"--torchpass-spares={spares}", "-N2")
    # Slurm calls it running while the prolog still runs
    bed.wait(lambda: helpers(bed, job) == set(NODES[: 2 + spares]), "every node of the job has a helper")
    return job


def helpers(bed: Bed, job: int) -> set[str]:
    """The nodes with a helper: with its process and the job's socket."""
    found = set()
    for node in NODES:
        process = bed.run(["pgrep", "^torchpass-help$"], user="root", node=node, check=False).stdout.split()
        there = bed.run(["test", "-S", f"/run/torchpass/job{job}.{node}.sock"], user="root", node=node, check=False)
        if len(process) == 1 and there.returncode == 0:
            found.add(node)
    return found


def traces(bed: Bed) -> str:
    """Processes, files and mounts of TorchPass on the nodes, but for what is no job's."""
    found = ""
    for node in bed.nodes:
        look = "pgrep torchpass; grep ' /run/torchpass' /proc/mounts; find /run/torchpass -mindepth 1"
        here = bed.run(["sh", "-c", look], user="root", node=node, check=False).stdout
        found += "".join(
            f"{node}: {line}\n" for line in here.splitlines() if not line.endswith(("helper.log", "claim.lock"))
        )
    return found


def nothing_left(bed: Bed) -> None:
    bed.wait(lambda: not traces(bed), f"nothing is left on the nodes: {traces(bed)}", 10)


def ask(bed: Bed, job: int, node: str, line: str, user: str = "alice") -> str:
    command = [sys.executable, ATTACKER, "timed", f"/run/torchpass/job{job}.{node}.sock", line]
    answer, _ = json.loads(bed.run(command, user=user, node=node).stdout)
    return str(answer)


def state(bed: Bed, node: str) -> set[str]:
    return set(bed.node(node)["State"].replace("*", "").split("+"))


@pytest.fixture(autouse=True)
def as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the jobs, and looks whether anything of them is left."""
    yield
    if "bed" in request.fixturenames:
        bed: Bed = request.getfixturevalue("bed")
        end(bed)
        nothing_left(bed)


def end(bed: Bed) -> None:
    bed.run(["scancel", "-u", "alice"], user="root")
    bed.wait(lambda: not bed.run(["squeue", "-h"]).stdout, "no job is left")
    for node in bed.nodes:
        if {"DRAIN", "DOWN"} & state(bed, node):
            bed.run(["scontrol", "update", f"nodename={node}", "state=resume"], user="root")
    bed.wait(lambda: all(state(bed, node) == {"IDLE"} for node in bed.nodes), "all nodes are idle", 60)


def test_every_node_of_the_job_has_one_while_it_runs(bed: Bed) -> None:
    job = submit(bed)
    for node in ("n1", "n2", "n3"):
        listing = bed.run(["ls", "-ld", f"/run/torchpass/job{job}.{node}.sock"], node=node).stdout.split()
        assert (listing[0], listing[2]) == ("srw-------", "alice")
        folder = bed.run(["ls", "-ld", f"/run/torchpass/job{job}.{node}"], node=node).stdout.split()
        assert (folder[0], folder[2]) == ("drwx------", "alice")
    assert ask(bed, job, "n3", "drain n2 xid 79") == "ok\n"  # from the idle spare, too
    assert ask(bed, job, "n3", "drain n4 x").startswith("refused: the node is not")
    assert ask(bed, job, "n1", "drain n3 x").startswith("refused: the job has used up")
    assert "DRAIN" in state(bed, "n2")


def test_it_ends_when_the_job_ends_by_itself(bed: Bed) -> None:
    done = bed.share / "done"
    job = submit(bed, script=f"while [ ! -e {done} ]; do sleep 0.1; done")
    done.touch()
    bed.wait_job(job, {"COMPLETED"})
    nothing_left(bed)


def test_a_job_without_spares_has_none(bed: Bed) -> None:
    job = bed.sbatch("sleep 1000", "-o", "/dev/null", "-N2")
    bed.wait_job(job, {"RUNNING"})
    assert helpers(bed, job) == set()


def test_it_outlives_a_node_that_goes_down(bed: Bed) -> None:
    """Slurm 22.05 kills the job's extern step on all nodes then."""
    job = submit(bed, spares=2)
    assert ask(bed, job, "n1", "drain n2 first") == "ok\n"
    assert ask(bed, job, "n1", "down n2 first") == "ok\n"
    assert state(bed, "n2") == {"DOWN", "DRAIN"}
    time.sleep(1)
    assert helpers(bed, job) == {"n1", "n2", "n3", "n4"}
    # No epilog will run on n2. Its helper ends with the next request, or when it looks, after ten minutes at most.
    assert ask(bed, job, "n2", "drain n3 x", "root") == "refused: the job does not run on this node any more\n"
    bed.wait(lambda: helpers(bed, job) == {"n1", "n3", "n4"}, "n2's helper has ended")
    by_hand = {"SLURM_JOB_ID": str(job), "SLURMD_NODENAME": "n2"}
    bed.run([PLUGIN / "epilog"], user="root", node="n2", env=by_hand)
    assert ask(bed, job, "n3", "drain n4 second") == "ok\n"
    assert ask(bed, job, "n1", "drain n3 third").startswith("refused: the job has used up")
    assert bed.job(job)["JobState"] == "RUNNING"


def test_slurmd_killed_and_started_again(bed: Bed) -> None:
    job = submit(bed)
    bed.kill_slurmd("n1")
    assert helpers(bed, job) == {"n1", "n2", "n3"}
    assert ask(bed, job, "n1", "drain n2 without slurmd") == "ok\n"
    bed.start_slurmd("n1")
    bed.wait(lambda: "NOT_RESPONDING" not in state(bed, "n1"), "n1 is back")
    assert helpers(bed, job) == {"n1", "n2", "n3"}
    assert ask(bed, job, "n1", "drain n2 with slurmd") == "ok\n"


def test_the_job_ends_while_slurmd_is_away(bed: Bed) -> None:
    """Then nobody ends the helper; it does nothing for anybody, and ends when it is asked."""
    job = submit(bed)
    bed.kill_slurmd("n3")
    try:
        bed.run(["scancel", str(job)])
        bed.wait(lambda: helpers(bed, job) == {"n3"}, "the others' helpers are gone")
        # the job is completing on n3 until its slurmd says otherwise, or until Slurm gives n3 up
        bed.run(["scontrol", "update", "nodename=n3", "state=down", "reason=test"], user="root")
        assert ask(bed, job, "n3", "drain n2 x") == "refused: the job does not run on this node any more\n"
        bed.wait(lambda: not helpers(bed, job), "n3's is gone, too")
    finally:
        bed.start_slurmd("n3")
    by_hand = {"SLURM_JOB_ID": str(job), "SLURMD_NODENAME": "n3"}
    bed.run([PLUGIN / "epilog"], user="root", node="n3", env=by_hand)


def test_a_requeued_job_gets_new_ones(bed: Bed) -> None:
    job = submit(bed)
    before = bed.run(["pgrep", "torchpass-help"], user="root", node="n1").stdout
    bed.run(["scontrol", "requeue", str(job)])
    bed.wait(lambda: not traces(bed), "its first life has ended")
    time.sleep(3)  # within a second, slurmd takes the second life for the first, and Slurm gives the job up
    bed.run(["scontrol", "update", f"jobid={job}", "starttime=now"], user="root")
    bed.wait(lambda: len(helpers(bed, job)) == 3, "it runs again, with helpers", 60)
    assert bed.job(job)["Restarts"] == "1"
    assert bed.run(["pgrep", "torchpass-help"], user="root", node="n1").stdout != before


def test_without_contain_it_is_the_same() -> None:
    with plugin_bed(nodes=3, prolog_flags="Alloc", epilog=PLUGIN / "epilog", prolog=Path("/bin/true")) as bed:
        job = bed.sbatch("sleep 1000", "-o", "/dev/null", "--torchpass-spares=1", "-N2")
        bed.wait_job(job, {"RUNNING"})
        assert ask(bed, job, "n3", "drain n2 x") == "ok\n"
        end(bed)
        nothing_left(bed)

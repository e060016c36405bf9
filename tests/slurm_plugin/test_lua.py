"""Who adds the spares: the plugin, cli_filter.lua or job_submit.lua. One of them, once, and the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Bed
from tests.cluster.toolchain import compile_in
from tests.slurm_plugin.building import HERE
from tests.slurm_plugin.plugin_bed import COMMANDS, VERSIONS, plugin_bed, submit

BOTH = ("cli_filter", "job_submit")


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


TOTALS = "on this cluster the controller adds the spares, for which -n and --gpus are of no use; write -N NODES"


@pytest.fixture(scope="module", params=["plugin", "cli_filter", "job_submit"])
def enlarger(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bed(enlarger: str, version: str) -> Iterator[Bed]:
    """A site that installed everything, and names one."""
    with plugin_bed(version, f"enlarge={enlarger}", BOTH) as bed:
        yield bed


ALLOCATED = [
    ("", (3, 1, 0)),
    ("-N3", (5, 1, 0)),
    ("-N3 --torchpass-spares=0", (3, 1, 0)),
    ("-N3 --ntasks-per-node=2 --gres=gpu:2", (5, 2, 2)),
    ("-N3 --ntasks-per-node=2 --gpus-per-task=1 -c2", (5, 2, 2)),
    ("-N3 -n6", (5, 2, 0)),
    ("-N3 -n6 --exclusive", (5, 2, 0)),
    ("-n6 --ntasks-per-node=2", (5, 2, 0)),
    ("-n1", (3, 1, 0)),
    ("-N3 -c4", (5, 1, 0)),
    ("-N3 --gpus=6", (5, 1, 2)),
    ("-N3 --gpus=fake:6", (5, 1, 2)),
    ("-N3 --gpus=6 --gpus-per-node=2", (5, 1, 2)),
    ("-N3 -x n1", (5, 1, 0)),
]

REFUSED = [
    ("-n6", "-n 6 alone does not say how many nodes train; write -N NODES --ntasks-per-node=TASKS instead"),
    ("-N3 -n7", "-n 7 is not a multiple of the 3 nodes that train; write --ntasks-per-node=TASKS instead of -n"),
    ("-N3 --gpus=8", "--gpus=8 is not a multiple of the 3 nodes that train; write --gpus-per-node=GPUS instead"),
    ("--gpus=8", "--gpus=8 alone does not say how many nodes train; write -N NODES --gpus-per-node=GPUS instead"),
]


def options_of(text: str) -> list[str]:
    return [*text.split(), *([] if "--torchpass-spares" in text else ["--torchpass-spares=2"])]


@pytest.mark.parametrize(("options", "expected"), ALLOCATED)
def test_never_twice(bed: Bed, enlarger: str, options: str, expected: tuple[int, int, int]) -> None:
    outcome = submit(bed, "sbatch", *options_of(options))
    nodes, tasks, gpus = expected
    if enlarger == "job_submit" and any(part.startswith(("-n", "--gpus=")) for part in options.split()):
        assert TOTALS in outcome.said
        assert outcome.code != 0
        return
    assert outcome.shape == (nodes, {tasks}, {gpus}), outcome
    assert outcome.code == 0


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("salloc", "-N3 --ntasks-per-node=2 --gres=gpu:2"),
        ("srun", "-N3 --ntasks-per-node=2 --gres=gpu:2"),
        ("srun", "-N3 -n6 --gpus=6"),
    ],
)
def test_other_commands(bed: Bed, command: str, options: str) -> None:
    outcome = submit(bed, command, *options_of(options))
    assert outcome.shape == (5, {2}, {2}), outcome
    assert outcome.code == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_refused(bed: Bed, command: str, options: str, sentence: str) -> None:
    outcome = submit(bed, command, *options_of(options))
    assert sentence in outcome.said
    assert outcome.code != 0
    assert not outcome.tasks


def test_jobs_in_a_job_and_without_the_option(bed: Bed) -> None:
    assert submit(bed, "sbatch", "-N3", "--ntasks-per-node=2").shape == (3, {2}, {0})
    script = (
        "sbatch --parsable -N1 --wrap true > inner; sbatch --parsable -N1 --torchpass-spares=1 --wrap true >> inner\n"
    )
    bed.wait_job(bed.sbatch(script, "-N1", "--torchpass-spares=1"), {"COMPLETED"})
    sizes = [bed.wait_job(int(job), {"COMPLETED"})["NumNodes"] for job in (bed.share / "inner").read_text().split()]
    assert sizes == ["1", "2"]


def test_the_allocation_outlives_a_node(bed: Bed) -> None:
    job = bed.sbatch("touch up; while [ ! -e over ]; do sleep 0.1; done\n", "-N1", "--torchpass-spares=1")
    bed.wait((bed.share / "up").exists, "the job runs")
    nodes = bed.run(["scontrol", "show", "hostnames", bed.job(job)["NodeList"]]).stdout.split()
    lost = (set(nodes) - {bed.job(job)["BatchHost"]}).pop()
    bed.run(["scontrol", "update", f"nodename={lost}", "state=down", "reason=test"], user="root")
    (bed.share / "over").touch()
    bed.wait_job(job, {"COMPLETED"})
    bed.run(["scontrol", "update", f"nodename={lost}", "state=resume"], user="root")
    (bed.share / "over").unlink()
    (bed.share / "up").unlink()


def test_a_heterogeneous_job(bed: Bed) -> None:
    script = bed.share / "het.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    done = bed.run(["sbatch", "-N1", "--torchpass-spares=1", ":", "-N1", script], check=False)
    assert "belongs to the last component only; write it there" in done.stderr
    assert done.returncode != 0
    job = int(bed.run(["sbatch", "--parsable", "-N1", ":", "-N2", "--torchpass-spares=1", script]).stdout)
    listed = bed.run(["squeue", "-h", "--states=all", "-S", "i", "-o", "%i %D"]).stdout.split("\n")
    assert [line for line in listed if line.startswith(f"{job}+")] == [f"{job}+0 1", f"{job}+1 3"]


# --- requests that come from no command of Slurm's -------------------------------------------------------

RAW = [
    # nodes, tasks, tasks a node, TRES of the job    what is allocated: nodes, tasks, GPUs; or a refusal
    ((2, 0, 0, ""), (4, 4, 0)),
    ((0, 0, 0, ""), (3, 3, 0)),
    ((2, 0, 2, ""), (4, 8, 0)),
    ((2, 4, 0, ""), (4, 8, 0)),
    ((2, 4, 2, ""), (4, 8, 0)),
    ((0, 4, 2, ""), (4, 8, 0)),
    ((2, 0, 0, "gres:gpu:4"), (4, 4, 8)),
    ((2, 0, 0, "gres:gpu:fake:4"), (4, 4, 8)),
    ((2, 3, 0, ""), "torchpass: -n 3 is not a multiple of the 2 nodes that train"),
    ((0, 4, 0, ""), "torchpass: -n 4 alone does not say how many nodes train"),
    ((2, 0, 0, "gres:gpu:3"), "torchpass: --gpus=3 is not a multiple of the 2 nodes that train"),
    ((2, 0, 0, "gres:nic:2"), "torchpass: a total of gres:nic:2 cannot be enlarged; ask for it per node instead"),
]


@pytest.fixture(scope="module")
def raw_bed(version: str) -> Iterator[Bed]:
    with plugin_bed(version, "enlarge=plugin", BOTH) as bed:
        yield bed


@pytest.mark.parametrize(("asked", "expected"), RAW)
def test_job_submit_alone(raw_bed: Bed, asked: tuple[object, ...], expected: tuple[int, int, int] | str) -> None:
    """Such as slurmrestd's, whatever plugstack.conf says."""
    bed = raw_bed
    program = compiled(bed)
    if bed.version != "22.05":
        asked = (*asked[:3], str(asked[3]).replace("gres:", "gres/"))
    script = bed.share / "raw.sh"
    script.write_text("#!/bin/sh\necho $TORCHPASS_SPARES > raw.spares\n")
    done = bed.run([program, script, *map(str, asked), "2"], check=False)
    if isinstance(expected, str):
        said = (bed.dir / "log/slurmctld.log").read_text()
        assert done.returncode != 0
        assert expected.replace("gres:", "gres:" if bed.version == "22.05" else "gres/") in said + done.stderr
        return
    job = bed.wait_job(int(done.stdout), {"COMPLETED"})
    nodes, tasks, gpus = expected
    assert (job["NumNodes"], job["NumTasks"]) == (str(nodes), str(tasks))
    if gpus:
        assert f"gres:gpu:{gpus // nodes}" in job["TresPerNode"].replace("/", ":").replace("fake:", "")
    assert (bed.share / "raw.spares").read_text() == "2\n"


def compiled(bed: Bed) -> Path:
    program = bed.share / "submit_raw"
    if not program.exists():
        compile_in(bed.version, ["gcc", "-Wall", "-Werror", "-o", program, HERE / "submit_raw.c", "-lslurm"], bed.share)
    return program


# --- one missing ------------------------------------------------------------------------------------------


def test_the_named_script_is_missing(version: str) -> None:
    with plugin_bed(version, "enlarge=cli_filter", nodes=2, gpus=0) as bed:
        outcome = submit(bed, "sbatch", "-N1", "--torchpass-spares=1")
        assert "plugstack.conf says enlarge=cli_filter, but no cli_filter.lua added the spares" in outcome.said
        assert outcome.code != 0
        assert submit(bed, "sbatch", "-N1").shape == (1, {1}, {0})


def test_inside_of_the_sites_own_scripts(version: str) -> None:
    """As the scripts' own heads tell an administrator to."""
    own = {
        "cli_filter": """
            function slurm_cli_setup_defaults(options) return slurm.SUCCESS end
            function slurm_cli_pre_submit(options)
              local rc = torchpass_pre_submit(options); if rc ~= slurm.SUCCESS then return rc end
              options["comment"] = "the site was here"
              return slurm.SUCCESS
            end
            function slurm_cli_post_submit() return slurm.SUCCESS end
        """,
        "job_submit": """
            function slurm_job_submit(job)
              local rc = torchpass_job_submit(job); if rc ~= slurm.SUCCESS then return rc end
              job.admin_comment = "the site was here"
              return slurm.SUCCESS
            end
            function slurm_job_modify() return slurm.SUCCESS end
            return slurm.SUCCESS
        """,
    }
    for name in BOTH:
        with plugin_bed(version, f"enlarge={name}", sites={name: own[name]}, nodes=3, gpus=0) as bed:
            job = bed.sbatch("true\n", "-N2", "--torchpass-spares=1")
            done = bed.wait_job(job, {"COMPLETED"})
            assert done["NumNodes"] == "3"
            assert "the site was here" in (done.get("Comment"), done.get("AdminComment"))

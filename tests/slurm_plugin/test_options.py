"""--torchpass-spares on real Slurm: what was asked, and what was allocated or refused."""

from collections.abc import Iterator

import pytest

from tests.cluster import Bed
from tests.slurm_plugin.plugin_bed import COMMANDS, VERSIONS, Outcome, plugin_bed, submit


@pytest.fixture(scope="module", params=VERSIONS)
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    with plugin_bed(request.param, "max_spares=4") as bed:
        yield bed


ALLOCATED = [
    # options, with --torchpass-spares=2 where none is given       nodes  tasks a node  GPUs a node
    ("", (3, 1, 0)),
    ("-N1", (3, 1, 0)),
    ("-N3", (5, 1, 0)),
    ("-N3 --torchpass-spares=1", (4, 1, 0)),
    ("-N3 --torchpass-spares=0", (3, 1, 0)),
    ("-N2 --torchpass-spares=4", (6, 1, 0)),
    ("-N3 --ntasks-per-node=1", (5, 1, 0)),
    ("-N3 --ntasks-per-node=2", (5, 2, 0)),
    ("-N3 --ntasks-per-node=2 --gres=gpu:2", (5, 2, 2)),
    ("-N3 --ntasks-per-node=2 --gpus-per-node=2", (5, 2, 2)),
    ("-N3 --ntasks-per-node=2 --gpus-per-task=1", (5, 2, 2)),
    ("-N3 --ntasks-per-node=2 -c2", (5, 2, 0)),
    ("-N3 -c4 --gres=gpu:4", (5, 1, 4)),
    ("-N3 -n6", (5, 2, 0)),
    ("-N3 -n6 --exclusive", (5, 2, 0)),
    ("-N3 -n6 --ntasks-per-node=2", (5, 2, 0)),
    ("-n6 --ntasks-per-node=2", (5, 2, 0)),
    ("-n1", (3, 1, 0)),
    ("-N3 --gpus=6", (5, 1, 2)),
    ("-N3 --gpus=fake:6", (5, 1, 2)),
    ("-N3 --gpus=6 --gpus-per-node=2", (5, 1, 2)),
    ("-N3 --gpus=6 --ntasks-per-gpu=1", (5, 2, 2)),
    ("-w n[2-4]", (5, 1, 0)),
    ("-N3 -w n6", (5, 1, 0)),
    ("-N3 -x n1", (5, 1, 0)),
]

# salloc polls for its nodes every few seconds, and adds nothing to these: what it does with all the others is sbatch's.
SALLOC = [
    "-N3",
    "-N3 --ntasks-per-node=2 --gres=gpu:2",
    "-N3 -n6",
    "-n6 --ntasks-per-node=2",
    "-N3 --gpus=6",
    "-w n[2-4]",
]

REFUSED = [
    ("-n6", "-n 6 alone does not say how many nodes train; write -N NODES --ntasks-per-node=TASKS instead"),
    ("-N3 -n7", "-n 7 is not a multiple of the 3 nodes that train; write --ntasks-per-node=TASKS instead of -n"),
    ("-n7 --ntasks-per-node=2", "-n 7 does not fill its last node"),
    ("--gpus=8", "--gpus=8 alone does not say how many nodes train; write -N NODES --gpus-per-node=GPUS instead"),
    ("-N3 --gpus=8", "--gpus=8 is not a multiple of the 3 nodes that train; write --gpus-per-node=GPUS instead"),
    (
        "-N3 --gpus=fake:3,other:3",
        "--gpus=fake:3,other:3 is not one number of GPUs; write --gpus-per-node=GPUS instead",
    ),
    ("-N3 -n6 --ntasks-per-gpu=1", "-n 6 with --ntasks-per-gpu counts tasks twice; write -N 3 --gpus-per-node=GPUS"),
    ("-N3 --torchpass-spares=5", "--torchpass-spares=5: write a number of nodes from 0 to 4"),
    ("-N3 --torchpass-spares=two", "--torchpass-spares=two: write a number of nodes from 0 to 4"),
    ("-N3 --torchpass-spares=-1", "--torchpass-spares=-1: write a number of nodes from 0 to 4"),
    ("-N3 --torchpass-spares=1.5", "--torchpass-spares=1.5: write"),
    ("-N3 --torchpass-spares=", "--torchpass-spares=: write"),
    ("-N0", "there is no training node in -N 0-0; write -N 1 or more"),
]


def ask(bed: Bed, command: str, options: str) -> Outcome:
    default = [] if "--torchpass-spares" in options else ["--torchpass-spares=2"]
    return submit(bed, command, *options.split(), *default)


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [(command, *row) for row in ALLOCATED for command in COMMANDS if command != "salloc" or row[0] in SALLOC],
)
def test_allocated(bed: Bed, command: str, options: str, expected: tuple[int, int, int]) -> None:
    outcome = ask(bed, command, options)
    nodes, tasks, gpus = expected
    assert outcome.shape == (nodes, {tasks}, {gpus}), outcome
    assert outcome.code == 0
    assert "error" not in outcome.said
    spares = nodes - 3 if "spares=0" not in options else 0
    assert spares == 0 or f"torchpass: {nodes} nodes, " in outcome.said


@pytest.mark.parametrize("command", ["sbatch", "salloc"])
def test_both_ends_of_a_range_move(bed: Bed, command: str) -> None:
    outcome = ask(bed, command, "-N2-3 --ntasks-per-node=2")
    assert outcome.shape == (5, {2}, {0}), outcome


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_refused(bed: Bed, command: str, options: str, sentence: str) -> None:
    """The plugin is `optional`; still nothing is submitted."""
    before = last_job(bed)
    outcome = ask(bed, command, options)
    assert sentence in outcome.said
    assert outcome.code != 0
    assert not outcome.tasks
    assert last_job(bed) == before


def last_job(bed: Bed) -> str:
    return bed.run(["scontrol", "-o", "show", "jobs"]).stdout.rpartition("JobId=")[2].split()[0:1].__str__()


def test_a_range_in_srun(bed: Bed) -> None:
    outcome = ask(bed, "srun", "-N2-3")
    assert "srun lays its tasks out for one number of nodes; write -N 2, or use sbatch or salloc" in outcome.said
    assert outcome.code != 0


def test_in_the_script_and_on_the_command_line(bed: Bed) -> None:
    def nodes(*options: str) -> str:
        job = bed.sbatch("#SBATCH -N3 --torchpass-spares=2\ntrue\n", *options)
        return bed.wait_job(job, {"COMPLETED"})["NumNodes"]

    assert nodes() == "5"
    assert nodes("--torchpass-spares=1") == "4"
    assert nodes("--torchpass-spares=0") == "3"


@pytest.mark.parametrize("command", COMMANDS)
def test_help(bed: Bed, command: str) -> None:
    told = bed.run([command, "--help"]).stdout.partition("Options provided by plugins:")[2]
    assert "--torchpass-spares=N" in told
    assert "spare" in told


def test_every_element_of_an_array_has_its_spares(bed: Bed) -> None:
    job = bed.sbatch("srun hostname > array.$SLURM_ARRAY_TASK_ID\n", "-N1", "--array=1-3", "--torchpass-spares=1")
    bed.wait(lambda: not bed.run(["squeue", "-h", "-j", str(job)], check=False).stdout, "the array is done")
    for element in (1, 2, 3):
        assert len((bed.share / f"array.{element}").read_text().splitlines()) == 2


HETEROGENEOUS = [
    ("-N1 : -N2 --torchpass-spares=1", None),
    ("-N1 : -N1 : -N1 --torchpass-spares=1", None),
    ("-N1 --torchpass-spares=1 : -N2", "belongs to the last component only; write it there"),
    ("-N1 : -N1 --torchpass-spares=1 : -N1", "belongs to the last component only; write it there"),
    ("-N1 --torchpass-spares=1 : -N1 --torchpass-spares=1", "belongs to the last component only; write it there"),
]


@pytest.mark.parametrize(("options", "sentence"), HETEROGENEOUS)
def test_heterogeneous_jobs(bed: Bed, options: str, sentence: str | None) -> None:
    script = bed.share / "het.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    done = bed.run(["sbatch", "--parsable", *options.split(), script], check=False)
    if sentence:
        assert sentence in done.stderr
        assert done.returncode != 0
        return
    job = int(done.stdout)
    components = [int(part.split()[0].removeprefix("-N")) for part in options.split(" : ")]
    *others, last = components
    listed = bed.run(["squeue", "-h", "--states=all", "-S", "i", "-o", "%i %D"]).stdout.split("\n")
    assert [line for line in listed if line.startswith(f"{job}+")] == [
        f"{job}+{place} {size}" for place, size in enumerate([*others, last + 1])
    ]


def test_a_list_of_sizes(bed: Bed) -> None:
    if bed.version == "22.05":
        pytest.skip("-N 2,4 is younger")
    outcome = ask(bed, "sbatch", "-N2,4")
    assert "-N with a list of node counts cannot be enlarged; write one number or MIN-MAX" in outcome.said
    assert outcome.code != 0


def test_segments(bed: Bed) -> None:
    if bed.version == "22.05":
        pytest.skip("--segment is younger")
    outcome = ask(bed, "sbatch", "-N2 --segment=2 --torchpass-spares=1")
    assert "are not whole segments of 2 nodes; write --torchpass-spares=2, or leave --segment away" in outcome.said
    # A bed has no topology with segments to run in; it is enough that Slurm takes the number.
    job = bed.sbatch("true\n", "--hold", "-N2", "--segment=2", "--torchpass-spares=2")
    assert bed.job(job)["NumNodes"] in ("4", "4-4")
    bed.run(["scancel", str(job)])


def test_arbitrary_placement(bed: Bed) -> None:
    (bed.share / "hosts").write_text("n1\nn2\n")
    done = bed.run(
        ["salloc", "-n2", "--torchpass-spares=1", "--distribution=arbitrary", "true"],
        env={"SLURM_HOSTFILE": str(bed.share / "hosts")},
        check=False,
    )
    assert "--distribution=arbitrary places every task by hand" in done.stderr
    assert done.returncode != 0

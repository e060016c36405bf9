"""What a job finds in its environment, what it hands on to jobs inside of it, and that other jobs find nothing."""

import re
from collections.abc import Iterator

import pytest

from tests.cluster import Bed
from tests.cluster.fixtures import open_bed
from tests.slurm_plugin.plugin_bed import COMMANDS, HARSH, VERSIONS, plugin_bed


@pytest.fixture(scope="module", params=VERSIONS)
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    with plugin_bed(request.param) as bed:
        yield bed


Variables = dict[str, str]


def variables(text: str) -> Variables:
    return dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))


def ours(found: Variables) -> Variables:
    return {name: value for name, value in found.items() if "TORCHPASS" in name or "torchpass" in name}


def tasks_of(
    bed: Bed, *options: str, step: str = "", env: Variables | None = None
) -> tuple[Variables, list[Variables]]:
    """The environment of a batch script, and those of its tasks."""
    for path in bed.share.glob("env.*"):
        path.unlink()
    run = "/bin/sh -c 'env > env.new.$SLURM_PROCID; mv env.new.$SLURM_PROCID env.task.$SLURM_PROCID'"
    job = bed.sbatch(f"env > env.batch\nsrun {step} {run}\n", *options, env=env)
    bed.wait_job(job, {"COMPLETED"})
    tasks = sorted(bed.share.glob("env.task.*"))
    return variables((bed.share / "env.batch").read_text()), [variables(path.read_text()) for path in tasks]


# --- what a job finds -------------------------------------------------------------------------------

EXPORTS: list[tuple[str, list[str], str]] = [
    ("all", [], ""),
    ("sbatch none", ["--export=NONE"], ""),
    ("sbatch some", ["--export=HOME,FOO=1"], ""),
    ("srun none", [], "--export=NONE"),
    ("srun some", [], "--export=HOME,FOO=1"),
    ("both none", ["--export=NONE"], "--export=NONE"),
]


@pytest.mark.parametrize(("options", "step"), [pytest.param(*row[1:], id=row[0]) for row in EXPORTS])
def test_whatever_is_exported_the_tasks_know_all(bed: Bed, options: list[str], step: str) -> None:
    batch, tasks = tasks_of(bed, "-N1", "--ntasks-per-node=2", "--torchpass-spares=1", *options, step=step)
    assert batch["TORCHPASS_SPARES"] == "1"
    assert "TORCHPASS_KEY" not in batch
    assert len(tasks) == 4
    for task in tasks:
        assert task["TORCHPASS_SPARES"] == "1"
        assert re.fullmatch("[0-9a-f]{64}", task["TORCHPASS_KEY"])
        assert re.fullmatch(rf"{bed.share}/\.torchpass-\d+-[0-9a-f]{{16}}\.verdict", task["TORCHPASS_VERDICT"])
        assert (task["SLURM_NO_KILL"], task["SLURM_KILL_BAD_EXIT"], task["SLURM_WAIT"]) == ("set", "0", "0")
        assert not [name for name in task if name.startswith("SLURM_TORCHPASS_")]
    assert len({task["TORCHPASS_KEY"] for task in tasks}) == 1


def test_every_step_has_its_own_key_and_verdict(bed: Bed) -> None:
    script = "for step in 1 2 3; do srun -n1 -N1 sh -c 'echo $TORCHPASS_KEY $TORCHPASS_VERDICT' >> keys; done\n"
    bed.wait_job(bed.sbatch(script, "-N1", "--torchpass-spares=1"), {"COMPLETED"})
    steps = (bed.share / "keys").read_text().split()
    assert len(set(steps)) == len(steps) == 6


@pytest.mark.parametrize("command", ["salloc", "srun"])
def test_without_a_script(bed: Bed, command: str) -> None:
    run = ["srun"] if command == "salloc" else []
    task = variables(bed.run([command, "-N1", "--torchpass-spares=1", *run, "env"]).stdout)
    assert task["TORCHPASS_SPARES"] == "1"
    assert task["TORCHPASS_KEY"]
    assert task["TORCHPASS_VERDICT"]
    assert (task["SLURM_NO_KILL"], task["SLURM_KILL_BAD_EXIT"], task["SLURM_WAIT"]) == ("set", "0", "0")


def test_spares_without_the_option(bed: Bed) -> None:
    """As on a site without the plugin: TORCHPASS_SPARES=2 srun in nodes that the user asked for."""
    _, tasks = tasks_of(bed, "-N2", "--no-kill", step="", env={"TORCHPASS_SPARES": "1"})
    assert len(tasks) == 2
    assert tasks[0]["TORCHPASS_KEY"]
    assert tasks[0]["SLURM_NO_KILL"] == "set"


@pytest.mark.parametrize("spares", ["", "0", "none", "-1"])
def test_spares_that_are_none(bed: Bed, spares: str) -> None:
    _, tasks = tasks_of(bed, "-N1", env={"TORCHPASS_SPARES": spares})
    assert ours(tasks[0]) == {"TORCHPASS_SPARES": spares}


INSIDE = [
    # the job's option, the step's, what srun says
    ("--torchpass-spares=1", "--torchpass-spares=1", None),
    ("--torchpass-spares=1", "--torchpass-spares=2", "inside of an allocation it is too late for --torchpass-spares"),
    ("--no-kill", "--torchpass-spares=1", "inside of an allocation it is too late for --torchpass-spares"),
]


@pytest.mark.parametrize(("job", "step", "sentence"), INSIDE)
def test_the_option_inside_of_an_allocation(bed: Bed, job: str, step: str, sentence: str | None) -> None:
    done = bed.run(["salloc", "-N2", job, "srun", step, "-N1", "-n1", "true"], check=False)
    if sentence is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        assert sentence in done.stderr
        assert "TORCHPASS_SPARES=N srun" in done.stderr


def test_the_prolog_knows(bed: Bed) -> None:
    with plugin_bed(
        bed.version, prolog="#!/bin/sh\nenv > /run/prolog.env\n", epilog="#!/bin/sh\nenv > /run/epilog.env\n", nodes=2
    ) as other:
        other.run(["srun", "-N1", "--torchpass-spares=1", "true"])
        for place in ("prolog", "epilog"):
            read = ["cat", f"/run/{place}.env"]
            other.wait(lambda: other.run(read, "root", "n2", check=False).stdout, place)  # noqa: B023
            assert "SPANK_TORCHPASS_SPARES=1\n" in other.run(read, "root", "n2").stdout


# --- jobs inside of a job ------------------------------------------------------------------------------

SUBMIT = "/usr/bin/sbatch -N1 -o inner.out --wrap env"


@pytest.mark.parametrize(
    "script",
    [
        f"{SUBMIT}\n",
        f"srun -N1 -n1 {SUBMIT}\n",
        f"export SLURM_NO_KILL=set\n{SUBMIT}\n",
    ],
)
@pytest.mark.parametrize("export", ["ALL", "NONE"])
def test_a_job_inside_of_a_job_is_another_job(bed: Bed, script: str, export: str) -> None:
    (bed.share / "inner.out").unlink(missing_ok=True)
    outer = bed.sbatch(script, "-N1", "--torchpass-spares=1", f"--export={export}")
    bed.wait_job(outer, {"COMPLETED"})
    inner = outer + 1
    assert bed.wait_job(inner, {"COMPLETED"})["NumNodes"] == "1"
    found = variables((bed.share / "inner.out").read_text())
    assert ours(found) == {}
    assert ("SLURM_NO_KILL" in found) == ("export SLURM_NO_KILL" in script)
    assert "SLURM_KILL_BAD_EXIT" not in found


def test_a_job_inside_of_a_job_may_have_spares_of_its_own(bed: Bed) -> None:
    script = "sbatch -N1 --torchpass-spares=2 -o inner2.out --wrap env\n"
    outer = bed.sbatch(script, "-N1", "--torchpass-spares=1")
    bed.wait_job(outer, {"COMPLETED"})
    assert bed.wait_job(outer + 1, {"COMPLETED"})["NumNodes"] == "3"
    assert variables((bed.share / "inner2.out").read_text())["TORCHPASS_SPARES"] == "2"


# --- jobs without the option -----------------------------------------------------------------------------


def observe(bed: Bed) -> dict[str, object]:
    """All that a user sees of three jobs without the option; what differs from bed to bed or run to run is masked."""

    def mask(text: str) -> str:
        text = text.replace(str(bed.dir), "BED")
        text = re.sub(r"(TIME|_PORT|SRUN_COMM_HOST|TASK_PID|SLUID|LAUNCH_NODE_IPADDR)=.*", r"\1=", text)
        text = re.sub(r"(\w*Time|LastSchedEval|SLUID|AllocNode:Sid)=\S+", r"\1=", text)
        waits = "step creation temporarily disabled|Step created for job|waiting for resources|allocated resources"
        noise = re.compile(f"error: .*pmix|{waits}")
        return "\n".join(sorted(line for line in text.splitlines() if not noise.search(line)))

    script = bed.share / "plain.sh"
    lines = ["#!/bin/bash", "#SBATCH -N2 --ntasks-per-node=2", "env > batch", "srun env > tasks", "srun -N1 -n1 false"]
    script.write_text("\n".join(lines) + "\n")
    seen: dict[str, object] = {}
    submitted = bed.run(["sbatch", script])
    job = bed.wait(lambda: (f := bed.job(1))["JobState"] == "FAILED" and f, "job 1 ends")
    seen["sbatch"] = (submitted.returncode, submitted.stdout, submitted.stderr)
    seen["job"] = mask("\n".join(f"{name}={value}" for name, value in job.items()))
    for name in ("batch", "tasks", "slurm-1.out"):
        seen[name] = mask((bed.share / name).read_text())
    for number, command in enumerate((["salloc", "-N2", "-Q", "srun", "env"], ["srun", "-N2", "env"]), 2):
        done = bed.run(command)
        seen[f"command {number}"] = (done.returncode, mask(done.stdout), mask(done.stderr))
    return seen


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_without_the_option_is_the_same_job(version: str) -> None:
    """With the plugin and without, on two fresh beds: not a byte differs."""
    with (
        open_bed(version=version, nodes=2, gpus=0, slurm_conf=HARSH) as without,
        plugin_bed(version, nodes=2, gpus=0) as bed,
    ):
        expected, found = observe(without), observe(bed)
    for name, value in expected.items():
        assert found[name] == value, name
    assert found == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_zero_spares_are_as_no_option(bed: Bed, command: str) -> None:
    run = ["--wrap", "env", "-o", "zero.out", "-W"] if command == "sbatch" else ["env"]
    done = bed.run([command, "-N1", "--torchpass-spares=0", *run])
    printed = (bed.share / "zero.out").read_text() if command == "sbatch" else done.stdout
    left = ours(variables(printed))
    assert "TORCHPASS_SPARES" not in left
    assert set(left) <= {"SLURM_SPANK__SLURM_SPANK_OPTION_torchpass_torchpass_spares"} | {
        name for name in left if name.startswith("_SLURM_SPANK")
    }
    assert "torchpass" not in done.stderr

"""What the plugin does inside of a job: steps that outlive their tasks, the verdict, and what it leaves alone."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Bed
from tests.slurm_plugin.plugin_bed import COMMANDS, VERSIONS, plugin_bed


@pytest.fixture(scope="module", params=VERSIONS)
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    with plugin_bed(request.param) as bed:
        yield bed


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))


def read(bed: Bed, name: str) -> str:
    return (bed.share / name).read_text()


def ended(bed: Bed, job: int, state: str, seconds: float = 30) -> dict[str, str]:
    return bed.wait_job(job, {state}, seconds)


# --- the verdict ----------------------------------------------------------------------------------

# What tpwrap does at its end: one task writes the verdict, all at once.
WRITE = "[ $SLURM_PROCID != 0 ] || (echo {code} > $TORCHPASS_VERDICT.new; mv $TORCHPASS_VERDICT.new $TORCHPASS_VERDICT)"

VERDICTS = [
    # the verdict, what the tasks do after it, the job's end
    ("a task was killed, the training is whole", WRITE.format(code=0) + "; kill -9 $$", "COMPLETED", "0:0"),
    ("a task failed, the training is whole", WRITE.format(code=0) + "; exit 9", "COMPLETED", "0:0"),
    ("all tasks end well, the training is lost", WRITE.format(code=75) + "; exit 0", "FAILED", "75:0"),
    ("no verdict, all well", "exit 0", "COMPLETED", "0:0"),
    ("no verdict, failed", "exit 9", "FAILED", "9:0"),
    ("the highest", WRITE.format(code=255), "FAILED", "255:0"),
    ("too high", WRITE.format(code=256) + "; exit 9", "FAILED", "9:0"),
    ("no number", WRITE.format(code="fine") + "; exit 9", "FAILED", "9:0"),
    ("a sign", WRITE.format(code="-0") + "; exit 9", "FAILED", "9:0"),
    ("empty", "[ $SLURM_PROCID != 0 ] || : > $TORCHPASS_VERDICT; exit 9", "FAILED", "9:0"),
    ("two", "[ $SLURM_PROCID != 0 ] || (echo 0; echo 0) > $TORCHPASS_VERDICT; exit 9", "FAILED", "9:0"),
    ("long", "[ $SLURM_PROCID != 0 ] || seq 100000 > $TORCHPASS_VERDICT; exit 9", "FAILED", "9:0"),
    ("a link to a good one", "[ $SLURM_PROCID != 0 ] || ln -s $PWD/good $TORCHPASS_VERDICT; exit 9", "FAILED", "9:0"),
    ("a pipe", "[ $SLURM_PROCID != 0 ] || mkfifo $TORCHPASS_VERDICT; exit 9", "FAILED", "9:0"),
    ("a folder", "[ $SLURM_PROCID != 0 ] || mkdir $TORCHPASS_VERDICT; exit 9", "FAILED", "9:0"),
]


@pytest.mark.parametrize(("task", "state", "code"), [pytest.param(*row[1:], id=row[0]) for row in VERDICTS])
def test_verdict(bed: Bed, task: str, state: str, code: str) -> None:
    folder = bed.share / "verdict"
    bed.run(["rm", "-rf", folder], user="root")
    bed.run(["mkdir", folder])
    (folder / "good").write_text("0\n")
    job = bed.sbatch(f"srun sh -c '{task}'\n", "-N1", "--torchpass-spares=1", cwd=folder)
    assert ended(bed, job, state)["ExitCode"] == code


def test_the_verdict_is_removed_and_a_bad_one_is_named(bed: Bed) -> None:
    job = bed.sbatch(f"srun sh -c '{WRITE.format(code=3)}'\n", "-N1", "--torchpass-spares=1", "-o", "removed.out")
    ended(bed, job, "FAILED")
    assert not list(bed.share.glob(".torchpass-*"))
    job = bed.sbatch(f"srun sh -c '{WRITE.format(code=300)}'\n", "-N1", "--torchpass-spares=1", "-o", "named.out")
    ended(bed, job, "COMPLETED")
    assert re.search(r"torchpass: \S+\.verdict does not hold a number from 0 to 255, so", read(bed, "named.out"))


def test_somebody_elses_file_is_no_verdict(bed: Bed) -> None:
    """A file that another user put there, which a folder open to everybody allows."""
    tell = "env > env.$SLURM_PROCID; touch ready.$SLURM_PROCID; while [ ! -e given ]; do sleep 0.05; done; exit 9"
    job = bed.sbatch(f"srun sh -c '{tell}'\n", "-N1", "--torchpass-spares=1")
    bed.wait((bed.share / "ready.0").exists, "the tasks run")
    place = Path(variables(read(bed, "env.0"))["TORCHPASS_VERDICT"])
    bed.run(["sh", "-c", f"echo 0 > {place}"], user="bob")
    (bed.share / "given").touch()
    assert ended(bed, job, "FAILED")["ExitCode"] == "9:0"
    place.unlink()


def test_verdicts_of_salloc_and_of_a_lone_srun(bed: Bed) -> None:
    task = WRITE.format(code=7)
    assert bed.run(["salloc", "-N1", "--torchpass-spares=1", "srun", "sh", "-c", task], check=False).returncode == 7
    assert bed.run(["srun", "-N1", "--torchpass-spares=1", "sh", "-c", task], check=False).returncode == 7


# --- steps that outlive their tasks ----------------------------------------------------------------

# Three tasks are gone after a second; the others must still be there after the site's WaitTime=3.
SURVIVE = (
    "sleep 1; case $SLURM_PROCID in 0) kill -9 $$;; 1) exit 1;; 2) exit 0;; esac; "
    "sleep 5; echo survived; [ $SLURM_PROCID != 3 ] || echo 0 > $TORCHPASS_VERDICT"
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_lost_task_ends_nothing(bed: Bed, command: str) -> None:
    """KillOnBadExit=1 and WaitTime=3 are the site's defaults here."""
    options = ["-N4", "--torchpass-spares=1"]
    if command == "sbatch":
        ended(bed, bed.sbatch(f"srun sh -c '{SURVIVE}'\n", *options, "-o", "survive.out"), "COMPLETED")
        printed = read(bed, "survive.out")
    else:
        run = ["srun"] if command == "salloc" else []
        printed = bed.run([command, *options, *run, "sh", "-c", SURVIVE]).stdout
    assert printed.count("survived") == 2, printed


def test_without_the_option_the_site_ends_all(bed: Bed) -> None:
    """So that the test above can fail."""
    assert "survived" not in bed.run(["srun", "-N5", "sh", "-c", SURVIVE], check=False).stdout


def test_options_on_the_command_line_of_srun_win(bed: Bed) -> None:
    command = ["salloc", "-N4", "--torchpass-spares=1", "srun", "--kill-on-bad-exit=1", "sh", "-c", SURVIVE]
    assert "survived" not in bed.run(command, check=False).stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_lost_node_ends_nothing(bed: Bed, command: str) -> None:
    """Slurm gives the node up; the job and the tasks on the other nodes go on."""
    folder = bed.share / f"lost-{command}"
    bed.run(["mkdir", folder])
    task = "touch on.$(hostname); while [ ! -e end ]; do sleep 0.05; done; touch after.$(hostname)"

    def marked(mark: str) -> set[str]:
        return {path.suffix[1:] for path in folder.glob(f"{mark}.*")}

    (folder / "script").write_text(f"#!/bin/bash\nsrun sh -c '{task}'\ntouch {folder}/over\n")
    run = {"sbatch": ["script"], "salloc": ["srun", "sh", "-c", task], "srun": ["sh", "-c", task]}[command]
    with bed.popen([command, "-N2", "--torchpass-spares=1", *run], cwd=folder) as process:
        bed.wait(lambda: len(marked("on")) == 3, "three tasks")
        lost = max(marked("on"))
        bed.run(["scontrol", "update", f"nodename={lost}", "state=down", "reason=test"], user="root")
        time.sleep(1)
        (folder / "end").touch()
        process.wait(30)
    if command == "sbatch":
        bed.wait((folder / "over").exists, "the script goes on after srun")
    assert marked("after") == marked("on") - {lost}
    bed.run(["scontrol", "update", f"nodename={lost}", "state=resume"], user="root")
    bed.wait(lambda: bed.node(lost)["State"] == "IDLE", f"{lost} is back")


# --- the helper ---------------------------------------------------------------------------------------


def test_every_node_of_the_job_has_a_helper_while_the_job_lives(bed: Bed) -> None:
    """Idle spares included, where no task of the job ever runs."""
    job = bed.sbatch("touch helpers; sleep 60\n", "-N1", "--torchpass-spares=2")
    bed.wait((bed.share / "helpers").exists, "the job runs")
    nodes = bed.run(["scontrol", "show", "hostnames", bed.job(job)["NodeList"]]).stdout.split()
    assert len(nodes) == 3

    def files(node: str) -> list[str]:
        return bed.run(
            ["find", "/run", "-path", "/run/torchpass/*", "-name", f"job{job}.*"], "root", node
        ).stdout.split()

    for node in nodes:
        place = f"/run/torchpass/job{job}.{node}"
        assert f"{place}.sock" in files(node)
        record = bed.run(["cat", f"{place}.job"], "alice", node).stdout.splitlines()
        assert record[:2] == ["uid 2001", "spares 2"]
        assert record[2].startswith("nodes n")
    bed.run(["scancel", str(job)])
    for node in nodes:
        bed.wait(lambda: not [file for file in files(node) if file.endswith("sock")], "no helper is left")  # noqa: B023

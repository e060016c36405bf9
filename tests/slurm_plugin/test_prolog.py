"""Prolog, epilog and health check: a sick node is found, drained and named to the job, which starts all the same."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster import Bed
from tests.slurm_plugin.building import PLUGIN
from tests.slurm_plugin.plugin_bed import VERSIONS, plugin_bed

HOOKS = "/etc/torchpass/health.d"  # in the bed; all nodes share it
NODES = ["n1", "n2", "n3", "n4"]


@pytest.fixture(scope="module", params=VERSIONS)
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    scripts = {"prolog": PLUGIN / "prolog", "epilog": PLUGIN / "epilog"}
    with plugin_bed(request.param, nodes=4, **scripts) as opened:
        yield opened


@pytest.fixture(autouse=True)
def as_it_was(bed: Bed) -> Iterator[None]:
    yield
    bed.run(["scancel", "-u", "alice"], user="root")
    bed.wait(lambda: not bed.run(["squeue", "-h"]).stdout, "no job is left")
    root(bed, f"rm -rf {HOOKS}")
    for node in NODES:
        if "DRAIN" in bed.node(node)["State"]:
            bed.run(["scontrol", "update", f"nodename={node}", "state=resume"], user="root")
    bed.wait(lambda: all(bed.node(node)["State"] == "IDLE" for node in NODES), "all nodes are idle", 60)


def root(
    bed: Bed, script: str, node: str = "n1", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return bed.run(["sh", "-c", script], user="root", node=node, env=env, check=False, timeout=60)


def hook(bed: Bed, script: str, name: str = "gpu") -> None:
    root(bed, f"mkdir -p {HOOKS}; cat > {HOOKS}/{name} <<'END'\n#!/bin/sh\n{script}\nEND\nchmod 755 {HOOKS}/{name}")


# --- health -----------------------------------------------------------------------------------------------


def health(bed: Bed, before: str = ":", env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Its exit code and what it says, after `before` in a mount namespace of its own."""
    script = f"set -e; {before}; exec {PLUGIN}/health"
    done = bed.run(["unshare", "--mount", "sh", "-c", script], user="root", node="n1", env=env, check=False, timeout=60)
    assert done.stderr == ""
    assert root(bed, "ls -d /run/torchpass-health* /tmp/torchpass-health*").stdout == ""
    return done.returncode, done.stdout


def test_a_healthy_node_is_silent(bed: Bed) -> None:
    hook(bed, "echo all is well", "50-network")
    hook(bed, "exit 1", "README")
    root(bed, f"chmod 644 {HOOKS}/README; mkdir {HOOKS}/old")
    start = time.monotonic()
    assert health(bed) == (0, "")
    assert time.monotonic() - start < 5


DEV = "mount -t tmpfs dev /dev; mknod -m 666 /dev/null c 1 3"
SMI = "mkdir -p /tmp/bin; printf '#!/bin/sh\\n%s\\n' {} > /tmp/bin/nvidia-smi; chmod 755 /tmp/bin/nvidia-smi"
TWO_GPUS = SMI.format('\'echo "GPU 0: H100"; echo "  MIG 1g Device 0:"; echo "GPU 1: H100"\'')

SICK = [
    ("mount -t tmpfs -o ro tmp /tmp", {}, "/tmp: mktemp: failed to create file via template"),
    ("mount -t tmpfs -o size=1m tmp /tmp", {}, "/tmp: only 1024 kB are free"),
    (f"{DEV}; mknod /dev/nvidia0 c 239 250", {}, "/dev/nvidia0: dd: failed to open '/dev/nvidia0'"),
    (SMI.format("'echo No devices were found; exit 6'"), {}, "nvidia-smi -L: No devices were found"),
    (SMI.format("'exit 9'"), {}, "nvidia-smi -L: failed with 9"),
    (TWO_GPUS, {"SLURM_JOB_GPUS": "0,1,2"}, "nvidia-smi -L: 2 GPUs, but the job has 3 here"),
    (
        "echo '/dev/sda / ext4 ro,relatime 0 0' > /tmp/mounts; mount --bind /tmp/mounts /proc/$$/mounts",
        {},
        "the root file",
    ),
]
WELL = [
    (f"{DEV}; mknod -m 666 /dev/nvidia0 c 1 3; mknod -m 666 /dev/nvidiactl c 239 250", {}),
    (TWO_GPUS, {"SLURM_JOB_GPUS": "0,1"}),
    (TWO_GPUS, {}),
    ("echo '/dev/sda / ext4 rw,errors=remount-ro 0 0' > /tmp/mounts; mount --bind /tmp/mounts /proc/$$/mounts", {}),
    ("echo 'image / squashfs ro 0 0' > /tmp/mounts; mount --bind /tmp/mounts /proc/$$/mounts", {}),
]
SMI_PATH = {"PATH": "/tmp/bin:/usr/bin:/bin"}


@pytest.mark.parametrize(("before", "env", "why"), SICK, ids=[why[:30] for *_, why in SICK])
def test_a_sick_node_says_why(bed: Bed, before: str, env: dict[str, str], why: str) -> None:
    code, said = health(bed, before, {**SMI_PATH, **env})
    root(bed, "rm -rf /tmp/bin /tmp/mounts")
    assert code == 1
    assert said.startswith(why)
    assert said.count("\n") == 1


@pytest.mark.parametrize(("before", "env"), WELL)
def test_what_is_no_sickness(bed: Bed, before: str, env: dict[str, str]) -> None:
    code, said = health(bed, before, {**SMI_PATH, **env})
    root(bed, "rm -rf /tmp/bin /tmp/mounts")
    assert (code, said) == (0, "")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'xid 79 on GPU 3'; echo more; exit 1", "gpu: xid 79 on GPU 3\n"),
        ("echo to stderr >&2; exit 2", "gpu: to stderr\n"),
        ("exit 3", "gpu: failed with 3\n"),
        ("printf 'a\\033[31mb\\tc\\n'; exit 1", "gpu: a?[31mb?c\n"),
        ("head -c 5000 /dev/zero | tr '\\0' x; exit 1", "gpu: " + "x" * 195 + "\n"),
        ("kill -9 $$", "gpu: no answer in 10 s\n"),
    ],
)
def test_a_site_adds_checks(bed: Bed, script: str, why: str) -> None:
    hook(bed, script)
    assert health(bed) == (1, why)


def test_a_check_that_hangs_is_an_answer(bed: Bed) -> None:
    hook(bed, "trap '' TERM; sleep 4321 & sleep 4321; sleep 4321")
    start = time.monotonic()
    assert health(bed) == (1, "gpu: no answer in 10 s\n")
    assert time.monotonic() - start < 20


# --- in a job ---------------------------------------------------------------------------------------------


def submit(bed: Bed, *options: str) -> int:
    job = bed.sbatch("sleep 1000", "-o", "/dev/null", "-N2", *options)
    bed.wait_job(job, {"RUNNING"})
    nodes = int(bed.job(job)["NumNodes"])
    sockets = f"ls /run/torchpass/job{job}.*.sock"
    bed.wait(lambda: sum(root(bed, sockets, node).returncode == 0 for node in NODES) in (0, nodes), "the prologs began")
    bed.wait(lambda: not any(root(bed, "pgrep -x health", node).stdout for node in NODES), "the prologs are done")
    return job


def sick(bed: Bed, job: int, node: str) -> str:
    return root(bed, f"cd /run/torchpass; cat job{job}.{node}.sick; stat -c ' %U %a' job{job}.{node}.sick", node).stdout


def test_sick_nodes_are_drained_and_the_job_starts(bed: Bed) -> None:
    hook(bed, 'case $(hostname) in n2 | n3) echo "GPU 3 \'fell\' off the \\\\ \\"bus\\""; exit 1 ;; esac')
    job = submit(bed, "--torchpass-spares=1")
    why = "gpu: GPU 3 fell off the  bus"
    for node in ("n2", "n3"):
        bed.wait(lambda node=node: "DRAIN" in bed.node(node)["State"], f"{node} is draining")
        assert bed.node(node)["Reason"].startswith(f"torchpass: {why} [root@")
        assert sick(bed, job, node) == f"{why}\n root 644\n"
    assert sick(bed, job, "n1") == ""
    assert bed.node("n1")["State"] == "MIXED"
    assert bed.job(job)["JobState"] == "RUNNING"
    assert bed.job(job)["Restarts"] == "0"
    ran = bed.run(["srun", "--overlap", f"--jobid={job}", "-N3", "hostname"]).stdout.split()
    assert sorted(ran) == ["n1", "n2", "n3"]


def test_only_jobs_with_spares_are_checked(bed: Bed) -> None:
    hook(bed, "exit 1")
    submit(bed)
    assert not any("DRAIN" in bed.node(node)["State"] for node in NODES)
    assert root(bed, "ls /run/torchpass | grep job").stdout == ""


def test_the_jobs_folder_belongs_to_the_user_and_is_small(bed: Bed) -> None:
    job = submit(bed, "--torchpass-spares=1")
    folder = f"/run/torchpass/job{job}.n1"
    assert root(bed, f"stat -c '%U %a' {folder}").stdout == "alice 700\n"
    assert bed.run(["ls", folder], user="bob", node="n1", check=False).returncode != 0
    fill = f"head -c 3000000 /dev/zero > {folder}/big; for i in $(seq 200); do : > {folder}/$i || exit 1; done"
    assert bed.run(["sh", "-c", fill], node="n1", check=False).returncode != 0
    assert int(root(bed, f"du -s {folder}").stdout.split()[0]) <= 1024
    before = root(bed, "echo precious > /root/precious; mkdir -p /root/folder/inner; ls /root; ls /etc").stdout
    bed.run(["sh", "-c", f"rm {folder}/*; ln -s /root/folder /etc /root/precious {folder}"], node="n1")
    root(bed, "echo other > /run/torchpass/job99999.n1.job")
    bed.run(["scancel", str(job)])
    left = "find /run/torchpass -mindepth 1 ! -name helper.log ! -name claim.lock"
    bed.wait(lambda: root(bed, left).stdout == "/run/torchpass/job99999.n1.job\n", "the job's traces are gone")
    assert root(bed, "ls /root; ls /etc").stdout == before
    root(bed, "rm -r /run/torchpass/job99999.n1.job /root/precious /root/folder")


@pytest.mark.parametrize(
    "odd",
    [
        {"SLURM_JOB_ID": ""},
        {"SLURM_JOB_ID": "1; touch /tmp/pwned"},
        {"SLURM_JOB_ID": "../../etc"},
        {"SLURMD_NODENAME": "../../../etc"},
        {"SLURMD_NODENAME": ""},
        {"SLURM_JOB_UID": "root"},
        {"SPANK_TORCHPASS_SPARES": "$(touch /tmp/pwned)"},
        {"SPANK_TORCHPASS_SPARES": ""},
        {"SPANK_TORCHPASS_SPARES": "0"},
    ],
    ids=str,
)
def test_an_odd_environment_does_nothing_and_fails_nothing(bed: Bed, odd: dict[str, str]) -> None:
    hook(bed, "exit 1")
    env = {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": "2001", "SLURMD_NODENAME": "n1", "SPANK_TORCHPASS_SPARES": "1"}
    before = root(bed, "ls / /etc; ls /run/torchpass | grep job").stdout
    assert root(bed, f"{PLUGIN}/prolog", env={**env, **odd}).returncode == 0
    assert root(bed, "ls / /etc; ls /run/torchpass | grep job").stdout == before
    assert "DRAIN" not in bed.node("n1")["State"]
    assert root(bed, f"{PLUGIN}/epilog", env={**env, **odd}).returncode == 0
    assert root(bed, "ls / /etc; ls /run/torchpass | grep job; ls /tmp/pwned").stdout == before


def test_prolog_never_fails(bed: Bed) -> None:
    """Whatever happens to it: slurmctld away, /run full, the health check missing."""
    env = {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": "2001", "SLURMD_NODENAME": "n1", "SPANK_TORCHPASS_SPARES": "1"}
    in_full = f"mount -t tmpfs -o size=4k,nr_inodes=2 full /run; {PLUGIN}/prolog; echo $?"
    done = bed.run(["unshare", "--mount", "sh", "-c", in_full], user="root", node="n1", env=env, timeout=60)
    assert done.stdout == "0\n"
    alone = f"mkdir -p /tmp/alone; cp {PLUGIN}/prolog /tmp/alone; /tmp/alone/prolog; echo $?; rm -r /tmp/alone"
    assert root(bed, alone, env=env).stdout == "0\n"
    hook(bed, "exit 1")
    link = f"ln -sf {PLUGIN}/prolog /tmp/link; /tmp/link; echo $?; rm /tmp/link; cat /run/torchpass/job4711.n1.sick"
    assert root(bed, link, env=env).stdout == "0\ngpu: failed with 1\n"
    assert root(bed, f"{PLUGIN}/epilog; echo $?; ls /run/torchpass | grep 4711", env=env).stdout == "0\n"


@pytest.fixture(scope="module")
def parts() -> list[Path]:
    return [PLUGIN / name for name in ("prolog", "epilog", "health", "healthcheck")]


def test_the_scripts_are_plain_sh(parts: list[Path]) -> None:
    for part in parts:
        assert part.read_text().startswith("#!/bin/sh\n")
        subprocess.run(["dash", "-n", part], check=True)
        assert part.stat().st_mode & 0o111

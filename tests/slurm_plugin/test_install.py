"""`make install` and `make uninstall`, and what a site sees of a faulty line in plugstack.conf."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.fixtures import open_bed
from tests.slurm_plugin.building import PLUGIN
from tests.slurm_plugin.plugin_bed import VERSIONS, built, plugin_bed, submit


def make(target: str, *settings: str, version: str = "22.05") -> None:
    build = built(version)
    command = ["make", "-s", "-C", PLUGIN, target, f"BUILD={build}", f"SLURM_INCLUDE={build}/include", *settings]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def test_install_and_uninstall(tmp_path: Path) -> None:
    plugstack = tmp_path / "etc/slurm/plugstack.conf"
    plugstack.parent.mkdir(parents=True)
    plugstack.write_text("optional /usr/lib/other.so\n")
    for _ in range(2):  # again changes nothing
        make("install", f"DESTDIR={tmp_path}", "PREFIX=/opt/tp", "PLUGSTACK=/etc/slurm/plugstack.conf")
    lines = ["optional /usr/lib/other.so", "optional /opt/tp/lib/torchpass/torchpass.so"]
    assert plugstack.read_text().splitlines() == lines
    installed = files(tmp_path)
    for name in ("torchpass.so", "prolog", "epilog", "health"):
        assert f"opt/tp/lib/torchpass/{name}" in installed
    for name in ("cli_filter.lua", "job_submit.lua"):
        assert f"opt/tp/share/torchpass/lua/{name}" in installed
    assert (tmp_path / "opt/tp/lib/torchpass/prolog").stat().st_mode & 0o777 == 0o755
    make("uninstall", f"DESTDIR={tmp_path}", "PREFIX=/opt/tp", "PLUGSTACK=/etc/slurm/plugstack.conf")
    assert files(tmp_path) == ["etc/slurm/plugstack.conf"]
    assert plugstack.read_text() == "optional /usr/lib/other.so\n"


def test_the_sites_own_arguments_stay(tmp_path: Path) -> None:
    plugstack = tmp_path / "plugstack.conf"
    plugstack.write_text("optional /usr/local/lib/torchpass/torchpass.so max_spares=4\n")
    make("install", f"DESTDIR={tmp_path}", "PLUGSTACK=/plugstack.conf")
    assert plugstack.read_text() == "optional /usr/local/lib/torchpass/torchpass.so max_spares=4\n"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_faulty_line(version: str) -> None:
    """Everything but the helper works; slurmd's log and those who use the option hear of it, nobody else."""
    with plugin_bed(version, "max_spares=4 color=blue", nodes=2, gpus=0) as bed:
        told = "torchpass: 'color=blue' in plugstack.conf is not understood; write max_spares=N"
        assert told in (bed.dir / "log/slurmd.n1.log").read_text()
        outcome = submit(bed, "sbatch", "-N1", "--torchpass-spares=1")
        assert outcome.said.count(told) == 1
        assert outcome.shape == (2, {1}, {0})
        plain = bed.run(["sbatch", "-N1", "--wrap", "ls /run/torchpass"])
        assert plain.stderr == ""
        job = bed.sbatch("touch up; sleep 30\n", "-N1", "--torchpass-spares=1")
        bed.wait((bed.share / "up").exists, "the job runs")
        for node in bed.nodes:
            assert not bed.run(["find", "/run", "-name", f"job{job}.*.sock"], "root", node).stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_a_running_cluster(version: str) -> None:
    """docs/install-slurm.md, step by step, on a cluster that runs without any of it."""
    with open_bed(version=version, nodes=2, gpus=0, prolog_flags="") as bed:
        doctor = ["srun", "-N1", "--torchpass-spares=1", Path(sys.executable).parent / "torchpass", "doctor"]
        assert bed.run(doctor, check=False).returncode != 0  # there is no such option yet
        etc, prefix = bed.dir / "etc/slurm", bed.share / "opt"
        make("install", f"PREFIX={prefix}", f"PLUGSTACK={etc}/plugstack.conf", version=version)
        scripts = prefix / "lib/torchpass"
        with open(etc / "slurm.conf", "a") as conf:
            conf.write(f"PrologFlags=Alloc\nProlog={scripts}/prolog\nEpilog={scripts}/epilog\n")
        bed.run(["scontrol", "reconfigure"], user="root")
        if version == "22.05":
            for node in bed.nodes:
                bed.kill_slurmd(node)
                bed.start_slurmd(node)
        bed.wait(lambda: "warning" not in (said := bed.run(doctor, check=False).stdout) and "listens" in said, "health")
        assert "error" not in bed.run(doctor).stdout

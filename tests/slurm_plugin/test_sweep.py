"""The HealthCheckProgram form of the helper: requests as files, and the same rules."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import Bed
from tests.slurm_plugin.building import PLUGIN, build
from tests.slurm_plugin.plugin_bed import VERSIONS, built, plugin_bed
from tests.slurm_plugin.test_request import REFUSED

REQUESTS = "/run/torchpass/requests"
ANSWERS = "/run/torchpass/answers"
CONF = "/etc/torchpass/healthcheck.conf"


@dataclass
class Site:
    bed: Bed
    program: Path
    job: int  # alice's, on n[1-3], with one spare

    def sh(self, script: str, user: str = "root", node: str = "n1", stdin: str | None = None) -> str:
        done = self.bed.run(["sh", "-c", script], user=user, node=node, check=False, timeout=60, input=stdin)
        return done.stdout + done.stderr

    def drop(self, line: str | bytes, name: str = "a1", user: str = "alice", node: str = "n1", job: int = 0) -> str:
        """Ask by a file; its name."""
        name = f"job{job or self.job}.{name}"
        data = line if isinstance(line, bytes) else line.encode() + b"\n"
        octal = "".join(f"\\{byte:03o}" for byte in data)
        script = f'cd {REQUESTS} && read -r octal && printf "$octal" > .{name} && mv .{name} {name}'
        said = self.sh(script, user, node, octal + "\n")
        assert said == "", said
        return name

    def sweep(self, node: str = "n1") -> None:
        done = self.bed.run([self.program], user="root", node=node, timeout=60)
        assert done.stdout + done.stderr == ""

    def answer(self, name: str, node: str = "n1", user: str = "alice") -> str:
        return self.sh(f"cat {ANSWERS}/{name}", user, node)

    def ask(self, line: str | bytes, user: str = "alice", node: str = "n1", job: int = 0) -> str:
        self.sh(f"rm -f {ANSWERS}/*", node=node)
        name = self.drop(line, user=user, node=node, job=job)
        self.sweep(node)
        assert self.sh(f"ls {REQUESTS}", node=node) == ""
        return self.answer(name, node)

    def out(self) -> set[str]:
        return {node for node in self.bed.nodes if {"DRAIN", "DOWN"} & set(self.bed.node(node)["State"].split("+"))}


@pytest.fixture(scope="module", params=VERSIONS)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("sweep")
    folder.chmod(0o755)
    made = built(request.param)
    place = [f"DESTDIR={folder}", "PREFIX=/usr", f"BUILD={made}", f"SLURM_INCLUDE={made}/include"]
    subprocess.run(["make", "-s", "-C", PLUGIN, "install", *place], check=True)
    program = folder / "usr/lib/torchpass/healthcheck"
    if request.param == "22.05":  # the sanitizers' libraries are the host's
        names = ("sweep", "act", "view", "request", "hostlist", "name", "audit", "record")
        build(program.with_name("torchpass-sweep"), *(PLUGIN / f"{name}.c" for name in names))
    with plugin_bed(request.param, "helper=no", nodes=4, prolog_flags="Alloc", expose=[folder]) as bed:
        opened = Site(bed, program, 0)
        for node in bed.nodes:
            opened.sweep(node)
        opened.job = bed.sbatch("sleep 1000", "-o", "/dev/null", "-N2", "--torchpass-spares=1")
        bed.wait_job(opened.job, {"RUNNING"})
        bed.wait(lambda: all(opened.sh("ls /run/torchpass | grep job", node=f"n{i}") for i in (1, 2, 3)), "records")
        yield opened


@pytest.fixture(autouse=True)
def as_it_was(site: Site) -> Iterator[None]:
    yield
    site.sh(f"rm -f {CONF}")
    for node in site.bed.nodes:
        site.sh(f"find {REQUESTS} {ANSWERS} -mindepth 1 -delete", node=node)
    for node in site.out():
        site.bed.run(["scontrol", "update", f"nodename={node}", "state=resume"], user="root")
    site.bed.wait(lambda: not site.out(), "all nodes are back")


def test_the_owner_drains_a_node(site: Site) -> None:
    assert site.ask("drain n2 xid 79") == "ok\n"
    assert site.out() == {"n2"}
    assert site.bed.node("n2")["Reason"].startswith(f"torchpass job {site.job}: xid 79 [root@")
    assert (
        site.ask("drain n3 x", node="n3") == "refused: the job has used up the number of nodes that it may take out\n"
    )
    assert site.ask("jobcomment active=2") == "ok\n"
    assert site.bed.job(site.job)["AdminComment"] == "active=2"
    assert site.ask("drain n1 x", user="root").startswith("refused: the job has used up")


def test_slurm_runs_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    place = [f"DESTDIR={tmp_path}", "PREFIX=/usr", f"BUILD={built()}"]
    subprocess.run(["make", "-s", "-C", PLUGIN, "install", *place], check=True)
    program = tmp_path / "usr/lib/torchpass/healthcheck"
    settings = [f"HealthCheckProgram={program}", "HealthCheckInterval=1", "HealthCheckNodeState=ANY"]
    options = {"nodes": 3, "prolog_flags": "", "expose": [tmp_path], "slurm_conf": settings}
    with plugin_bed("22.05", "helper=no", **options) as bed:
        site = Site(bed, program, 0)
        site.sh(f"mkdir -p /etc/torchpass; echo MAX_DRAIN=1 > {CONF}")
        job = bed.sbatch("sleep 1000", "-o", "/dev/null", "-N2", "--torchpass-spares=1")
        bed.wait_job(job, {"RUNNING"})
        bed.wait(lambda: site.sh(f"test -d {REQUESTS} && echo yes", node="n2") == "yes\n", "n2 has been checked")
        name = site.drop("drain n3 x", node="n2", job=job)  # no prolog on n2, no helper: only this
        bed.wait(lambda: site.answer(name, "n2") == "ok\n", "it is done", 15)
        assert "DRAIN" in bed.node("n3")["State"]


def test_another_user_gets_nothing(site: Site) -> None:
    for line in ("drain n2 x", "down n2 x", "nodecomment n2 x", "jobcomment x"):
        assert site.ask(line, user="bob") == "refused: the caller is not the job's owner\n"
    assert site.ask("drain n4 x") == "refused: the node is not one of the job's nodes\n"
    assert site.ask("drain n2 x", node="n4") == "refused: this node is not one of the job's nodes\n"
    assert site.ask("drain n2 x", job=site.job + 77) == "refused: Slurm does not know the job as running\n"
    assert site.out() == set()


def test_nor_by_the_files_of_others(site: Site) -> None:
    """Links to what alice owns, and names that are none."""
    name = f"job{site.job}.a1"
    site.sh(f"printf 'drain n2 x\\n' > {REQUESTS}/.draft; chmod 644 {REQUESTS}/.draft", "alice")
    tricks = [
        f"ln -s .draft {name}",
        f"ln -s /root/secret {name}",
        f"ln .draft {name}",
        f"mkfifo {name}",
        f"mkdir {name}; printf 'drain n2 x\\n' > {name}/{name}",
        f"python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"{name}\")'",
    ]
    for user in ("bob", "alice"):
        for trick in tricks:
            site.sh(f"cd {REQUESTS} && {trick}", user)
            start = time.monotonic()
            site.sweep()
            assert time.monotonic() - start < 5
            assert "No such file" in site.answer(name), trick
            site.sh(f"rm -rf {REQUESTS}/{name}")
    assert site.out() == set()


NO_NAMES = ["x", "job.a", "job1", "job1.", "job01.a", "job-1.a", "job1.a b", "job1.;id", "job1.a.b", "jobx.a"]
NO_NAMES += ["job99999999999.a", "job4294967296.a", f"job1.{'a' * 33}", "-rf", "job1.$(id)", "job1.a\nb"]


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_a_file_of_another_name_is_no_request(site: Site, name: str) -> None:
    site.bed.run(["touch", "--", f"{REQUESTS}/{name}"], node="n1")
    site.sweep()
    assert site.sh(f"ls -A {ANSWERS}") == ""


def test_no_line_that_the_parser_refuses_has_an_effect(site: Site) -> None:
    site.sh(f"mkdir -p /etc/torchpass; echo MAX_DRAIN=9 > {CONF}")
    lines = [line + b"\n" for line, _ in REFUSED]
    lines += [b"", b"drain n2 x", b"\n", b"drain n2 x\n\n", b"drain n2 x\ndrain n3 x\n", b"x" * 70000, b"\xff" * 700]
    for start in range(0, len(lines), 8):
        names = [site.drop(line, f"a{start + i}") for i, line in enumerate(lines[start : start + 8])]
        site.sweep()
        for name in names:
            assert site.answer(name).startswith("refused: "), name
    assert site.out() == set()


def test_the_sites_settings(site: Site) -> None:
    site.sh(f"mkdir -p /etc/torchpass; echo MAX_DRAIN=0 > {CONF}")
    assert site.ask("drain n2 x").startswith("refused: the job has used up")
    check = site.bed.share / "check"
    check.write_text("#!/bin/sh\ntest $2 = n3\n")
    check.chmod(0o755)
    site.sh(f"printf 'MAX_DRAIN=2\\nCONFIRM={check}\\n' > {CONF}")
    assert site.ask("drain n2 x") == "refused: the site's check says no\n"
    assert site.ask("drain n3 x") == "ok\n"
    site.sh(f"echo MAX_DRAIN=many > {CONF}; rm {ANSWERS}/*")
    name = site.drop("drain n2 x")
    wrong = site.bed.run([site.program], user="root", node="n1")
    assert wrong.stderr == "torchpass-sweep: MAX_DRAIN=many: write a number of nodes from 0 to 128\n"
    assert "No such file" in site.answer(name)


def test_a_flood_of_files_leaves_room_for_an_honest_one(site: Site) -> None:
    """Another user's files fill his share of a sweep, and the folder, but neither /run nor root's time."""
    flood = (
        f"cd {REQUESTS}; for i in $(seq 2000); do echo jobcomment flood > job{site.job}.f$i || break; done 2>/dev/null"
    )
    site.sh(flood, "bob")
    count = int(site.sh(f"ls {REQUESTS} | wc -l"))
    assert 900 < count < 1100  # the file system of the folder is small
    site.sh(f"rm {REQUESTS}/job{site.job}.f7", "bob")
    name = site.drop("drain n2 in the flood")
    start = time.monotonic()
    site.sweep()
    assert time.monotonic() - start < 10
    assert site.answer(name) == "ok\n"
    assert int(site.sh(f"ls {ANSWERS} | wc -l")) == 9
    assert site.sh(f"cat {ANSWERS}/*f*").count("refused") == 8
    site.sweep()
    assert site.sh(f"ls {REQUESTS}") == ""


def test_what_is_no_request_goes_with_time(site: Site) -> None:
    site.sh(f"cd {REQUESTS}; mkdir -p old/er; touch -d 2099-01-01 old/er/x .draft job1.x", "bob")
    script = site.program.read_text().replace("-cmin +1 ", "-cmin +-1 ")
    aged = site.program.with_name("aged")
    aged.write_text(script)
    aged.chmod(0o755)
    site.sweep()
    assert site.sh(f"ls -A {REQUESTS}") != ""  # not before its time
    assert site.bed.run([aged], user="root", node="n1").stderr == ""
    assert site.sh(f"ls -A {REQUESTS}") == ""


def test_answers_are_roots_and_for_all_to_read(site: Site) -> None:
    assert site.ask("drain n9 x").startswith("refused: ")
    assert site.sh(f"stat -c '%U %a' {ANSWERS} {REQUESTS} {ANSWERS}/*") == "root 755\nroot 1733\nroot 644\n"
    assert site.sh(f"ls {REQUESTS}", "bob") != ""
    assert "Permission denied" in site.sh(f"echo ok > {ANSWERS}/job{site.job}.a1", "bob")

"""The node helper on a real cluster: what it does for a job's owner, and what it refuses to everybody.

The helper under attack is built with the sanitizers and started for a real job of a real slurmctld.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Bed
from tests.cluster.fixtures import open_bed
from tests.slurm_plugin.building import HERE, PLUGIN, build
from tests.slurm_plugin.test_request import ACCEPTED, REFUSED

ATTACKER = HERE / "attacker.py"
SOURCES = [PLUGIN / f"{name}.c" for name in ("helper", "server", "act", "view", "request", "hostlist", "name", "audit")]
ALICE = 2001
NOT_OWNER = "refused: the caller is not the job's owner\n"
USED_UP = "refused: the job has used up the number of nodes that it may take out\n"


@dataclass
class Site:
    bed: Bed
    program: Path
    job: int  # alice's, on n[1-3]
    reports: Path
    submitted: float = 0  # when the last job started
    before: list[object] = field(default_factory=list)  # what Slurm said before the last helper started

    def socket(self, job: int, node: str) -> str:
        return f"/run/torchpass/job{job}.{node}.sock"

    def attack(self, how: str, *words: object, user: str = "alice", node: str = "n1", job: int = 0, **more: Any) -> Any:
        """What attacker.py says, run as `user` on `node`."""
        command = [sys.executable, ATTACKER, how, self.socket(job or self.job, node), *map(str, words)]
        done = self.bed.run(command, user=user, node=node, timeout=60, **more)
        return json.loads(done.stdout)

    def ask(self, line: str | bytes, **where: Any) -> str:
        data = line if isinstance(line, bytes) else line.encode() + b"\n"
        answer: str = self.attack("ask", input=json.dumps([data.hex()]), **where)[0]
        return answer

    def state(self, node: str) -> set[str]:
        return set(self.bed.node(node)["State"].split("+"))

    def reason(self, node: str) -> str:
        return self.bed.node(node).get("Reason", "").partition(" [root@")[0]

    def seen(self) -> list[object]:
        """All that a helper could change in Slurm."""
        names = ("Reason", "Comment", "Extra")
        nodes = {node: self.bed.node(node) for node in self.bed.nodes}
        found: list[object] = [(node, *map(fields.get, names)) for node, fields in nodes.items()]
        found += [(node, state) for node in nodes for state in ("DRAIN", "DOWN") if state in self.state(node)]
        return [*found, self.bed.job(self.job).get("AdminComment")]

    def untouched(self) -> bool:
        """Nothing has changed since the last helper started."""
        return self.seen() == self.before

    def log(self, node: str = "n1") -> str:
        return self.bed.run(["cat", "/run/torchpass/helper.log"], user="root", node=node, check=False).stdout

    def sbatch(self, *options: str, user: str = "alice") -> int:
        job = self.bed.sbatch("sleep 1000", "--no-kill", "-o", "/dev/null", *options, user=user)
        self.bed.wait_job(job, {"RUNNING"})
        self.submitted = time.time()
        return job

    def kill_slurmctld(self) -> None:
        """Once it has written down that our jobs run."""
        saved = self.bed.dir / "state/job_state"  # it writes at most every 5 s, and only what is new
        due = self.submitted + 8
        self.bed.wait(lambda: time.time() > due or saved.stat().st_mtime > self.submitted, "slurmctld saves its state")
        self.bed.kill_slurmctld()

    def mend(self) -> None:
        """All nodes as they were."""

        def mended(node: str) -> bool:  # not at once, where slurmctld has just started
            changes = [["state=resume"]] if {"DRAIN", "DOWN"} & self.state(node) else []
            changes += [["comment="]] if "Comment" in self.bed.node(node) else []
            for change in changes:
                self.bed.run(["scontrol", "update", f"nodename={node}", *change], user="root", check=False)
            return not changes

        for node in self.bed.nodes:
            self.bed.wait(lambda node=node: mended(node), f"{node} is as it was")

    def new_job(self) -> None:
        """Without slurmdbd, 22.05 lets nobody update a job that outlived slurmctld."""
        self.mend()
        self.bed.run(["scancel", str(self.job)], check=False)
        self.job = self.sbatch("-N3", "-w", "n[1-3]")

    @contextmanager
    def helper(
        self,
        *,
        job: int = 0,
        node: str = "n1",
        nodes: str = "n[1-3]",
        cap: int = 1,
        confirm: str = "",
        watch: int = 600,
    ) -> Iterator[None]:
        command = [self.program, job or self.job, ALICE, nodes, cap, confirm, node, "/run/torchpass", watch * 1000]
        self.before = self.seen()
        options = f"log_path={self.reports}/report:detect_leaks=0:abort_on_error=0"
        process = self.bed.popen(
            [str(word) for word in command],
            user="root",
            node=node,
            env={"ASAN_OPTIONS": options, "UBSAN_OPTIONS": options},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.stdin.close()
            status = process.stdout.read()
            process.wait(30)
        found = "".join(path.read_text() for path in self.reports.iterdir())
        assert (status, found) == ("0\n", "")
        assert "died" not in self.log(node)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("helper")
    folder.chmod(0o755)
    with open_bed(nodes=5, expose=[folder]) as bed:
        program = build(folder / "helper", *SOURCES, HERE / "helper_main.c")
        reports = bed.share / "reports"
        reports.mkdir()
        opened = Site(bed, program, 0, reports)
        opened.new_job()
        yield opened


@pytest.fixture(autouse=True)
def nodes_as_they_were(site: Site) -> Iterator[None]:
    yield
    site.mend()


# --- what it does -------------------------------------------------------------------------------------------


def test_the_owner_drains_a_node_and_sets_it_down(site: Site) -> None:
    job = site.sbatch("-N3", "-w", "n[1-3]")
    with site.helper(job=job):
        answer, seconds = site.attack("timed", "drain n2 xid 79 step 4711", job=job)
        assert answer == "ok\n"
        assert seconds < 2
        assert site.state("n2") >= {"DRAIN"}
        assert "DOWN" not in site.state("n2")
        assert site.reason("n2") == f"torchpass job {job}: xid 79 step 4711"
        assert site.ask("down n2 no answer", job=job) == "ok\n"
        assert site.state("n2") >= {"DOWN", "DRAIN"}
        assert site.reason("n2") == f"torchpass job {job}: no answer"
        # Slurm has taken it out of the job by now; it still is one of the job's nodes to us
        assert site.bed.job(job)["NodeList"] == "n[1,3]"
        assert site.ask("drain n2 again", job=job) == "ok\n"
        assert "did for uid 2001: drain n2 xid 79 step 4711" in site.log()
    site.bed.run(["scancel", str(job)])


def test_comments(site: Site) -> None:
    job = site.sbatch("-N3", "-w", "n[1-3]")
    with site.helper(job=job):
        assert site.ask("jobcomment active=2 spares=0/1; n2->n3", job=job) == "ok\n"
        assert site.bed.job(job)["AdminComment"] == "active=2 spares=0/1; n2->n3"
        assert site.ask("nodecomment n2 torchpass: xid 79 seen", job=job) == "ok\n"
        assert site.bed.node("n2")["Comment"] == "torchpass: xid 79 seen"
        assert site.ask("nodecomment n2 xid 79 seen", job=job) == "ok\n"  # one that does not say whose it is
        assert site.bed.node("n2")["Comment"] == f"torchpass job {job}: xid 79 seen"
    site.bed.run(["scancel", str(job)])


def test_root_may_ask_too(site: Site) -> None:
    with site.helper():
        assert site.ask("drain n2 by root", user="root") == "ok\n"
    assert site.reason("n2") == f"torchpass job {site.job}: by root"


def test_what_an_administrator_wrote_is_kept(site: Site) -> None:
    def scontrol(*words: str) -> None:
        site.bed.run(["scontrol", "update", "nodename=n2", *words], user="root")

    scontrol("state=drain", 'reason=bad "DIMM" 3')
    scontrol("comment=RMA 4711")
    with site.helper():
        assert site.ask("drain n2 xid 79") == "ok\n"
        assert site.ask("drain n2 xid 79 again") == "ok\n"
        assert site.reason("n2") == f"torchpass job {site.job}: xid 79 again; was: bad ?DIMM? 3"
        assert site.ask("nodecomment n2 torchpass: x") == "refused: the node has somebody else's comment\n"
        assert site.bed.node("n2")["Comment"] == "RMA 4711"


def test_a_node_with_another_users_job_is_drained_but_not_set_down(site: Site) -> None:
    bobs = site.sbatch("-N1", "-w", "n2", user="bob")
    with site.helper():
        refused = "refused: another user's job runs on the node: it may be drained, but not set down\n"
        assert site.ask("down n2 x") == refused
        assert site.state("n2") & {"DRAIN", "DOWN"} == set()
        assert site.ask("drain n2 x") == "ok\n"
        assert site.bed.job(bobs)["JobState"] == "RUNNING"
        site.bed.run(["scancel", str(bobs)], user="bob")
        site.bed.wait_job(bobs, {"CANCELLED"})


OVER = "refused: the job does not run on this node any more\n"


def ended(site: Site, job: int, node: str = "n1") -> bool:
    there = site.bed.run(["test", "-e", site.socket(job, node)], node=node, check=False).returncode == 0
    states = site.bed.run(["ps", "-C", "torchpass-help", "-o", "stat="], user="root", node=node, check=False).stdout
    return not there and all(state.startswith("Z") for state in states.split())  # our parent waits only at the end


@pytest.mark.parametrize("line", ["drain n2 x", "down n2 x", "nodecomment n2 x", "jobcomment x"])
def test_a_helper_that_outlived_its_job_does_nothing_and_ends(site: Site, line: str) -> None:
    job = site.sbatch("-N3", "-w", "n[1-3]")
    with site.helper(job=job):
        site.bed.run(["scancel", str(job)])
        site.bed.wait(lambda: not site.bed.run(["squeue", "-h", "-j", str(job)]).stdout, "the job is gone")
        assert site.ask(line, job=job) == OVER
        site.bed.wait(lambda: ended(site, job), "the helper has ended")
    assert site.untouched()


def test_so_does_one_on_a_node_that_was_fenced(site: Site) -> None:
    """The node still lives, and so does the job, but on other nodes."""
    job = site.sbatch("-N3", "-w", "n[1-3]")
    with site.helper(job=job, cap=2, node="n2"), site.helper(job=job, cap=2):
        assert site.ask("down n2 x", job=job) == "ok\n"
        assert site.ask("drain n3 x", job=job, node="n2") == OVER
        site.bed.wait(lambda: ended(site, job, "n2"), "the helper of n2 has ended")
        assert site.ask("drain n3 x", job=job) == "ok\n"
    site.bed.run(["scancel", str(job)])


def test_it_asks_now_and_then_whether_the_job_is_over(site: Site) -> None:
    job = site.sbatch("-N3", "-w", "n[1-3]")
    with site.helper(job=job, watch=1):
        time.sleep(2.5)
        assert not ended(site, job)
        site.kill_slurmctld()
        time.sleep(2.5)
        assert not ended(site, job)
        site.bed.start_slurmctld()
        site.bed.wait(lambda: site.bed.run(["scancel", str(job)], check=False).returncode == 0, "it is cancelled")
        site.bed.wait(lambda: ended(site, job), "the helper has ended")
    site.new_job()


def test_a_helper_that_is_not_told_the_nodes_asks_slurm(site: Site) -> None:
    with site.helper(nodes=""):
        assert site.ask("drain n4 x") == "refused: the node is not one of the job's nodes\n"
        assert site.ask("drain n3 x") == "ok\n"


def test_slurmctld_away_is_said_and_does_not_hold_up_the_rest(site: Site) -> None:
    with site.helper():
        site.kill_slurmctld()
        try:
            asking = site.bed.popen(
                [sys.executable, str(ATTACKER), "timed", site.socket(site.job, "n1"), "drain n2 x"],
                node="n1",
                stdout=subprocess.PIPE,
            )
            start = time.monotonic()
            assert site.ask("drain n4 x").startswith("refused: the node is not")
            assert time.monotonic() - start < 2
            answer, _ = json.loads(asking.communicate(timeout=40)[0])
            assert answer == "refused: slurmctld does not answer: try again later\n"
        finally:
            site.bed.start_slurmctld()
        answers: list[str] = []

        def drains() -> bool:
            answers.append(site.ask("drain n2 x"))
            time.sleep(0.5)
            return answers[-1] == "ok\n"

        end = time.monotonic() + 40
        while not drains():
            assert time.monotonic() < end, answers
    site.new_job()


# --- the cap ------------------------------------------------------------------------------------------------


def test_the_cap_counts_nodes_not_requests(site: Site) -> None:
    with site.helper(cap=1):
        assert site.ask("drain n2 x") == "ok\n"
        assert site.ask("drain n3 x") == USED_UP
        assert site.ask("down n3 x") == USED_UP
        assert site.ask("drain n2 y") == "ok\n"
        assert site.state("n3") & {"DRAIN", "DOWN"} == set()
        assert site.reason("n3") == ""
    with site.helper(cap=0, node="n3"):
        assert site.ask("drain n3 x", node="n3") == USED_UP


def race(site: Site, caps: Sequence[int]) -> None:
    nodes = ("n1", "n2", "n3")

    def out() -> set[str]:
        return {node for node in nodes if "DRAIN" in site.state(node)}

    for cap in caps:
        with ExitStack() as stack:
            for node in nodes:
                stack.enter_context(site.helper(node=node, cap=cap))
            asking = []
            for at in nodes:
                for node in nodes:
                    command = [sys.executable, str(ATTACKER), "timed", site.socket(site.job, at), f"drain {node} x"]
                    asking.append((node, site.bed.popen(command, node=at, stdout=subprocess.PIPE)))
            answers = [(node, json.loads(process.communicate(timeout=60)[0])[0]) for node, process in asking]
            assert {answer for _, answer in answers} <= {"ok\n", USED_UP}
            assert out() >= {node for node, answer in answers if answer == "ok\n"}
            assert len(out()) <= cap
            for node in nodes:  # they may all have stood in each other's way; one after the other they do not
                site.ask(f"drain {node} x")
            assert len(out()) == cap
            assert not [node for node in nodes if "Extra" in site.bed.node(node)]
        site.mend()


def test_the_helpers_of_a_job_share_its_cap(site: Site) -> None:
    """However many are asked at the same moment, and whatever for."""
    race(site, [1, 2])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_helpers_of_a_job_share_its_cap_again_and_again(site: Site) -> None:
    race(site, [1, 2] * 20)


def test_extra_of_a_node_is_only_borrowed(site: Site) -> None:
    def extra(text: str) -> None:
        site.bed.run(["scontrol", "update", "nodename=n1", f"extra={text}"], user="root")

    with site.helper():
        try:
            extra('{"rack": "a b", "gpu": \'h100\'}')
            assert site.ask("drain n2 x") == "ok\n"
            assert site.bed.node("n1")["Extra"] == '{"rack": "a b", "gpu": \'h100\'}'
        finally:
            extra("")


# --- the site's own check -----------------------------------------------------------------------------------


def test_the_sites_check_is_asked_and_obeyed(site: Site) -> None:
    check = site.bed.share / "check"
    check.write_text(f"#!/bin/sh\necho $# $* $(id -u) $PATH >> {site.bed.share}/asked\ntest $2 = n2\n")
    check.chmod(0o755)
    with site.helper(cap=3, confirm=str(check)):
        assert site.ask("drain n2 x") == "ok\n"
        assert site.ask("down n3 x") == "refused: the site's check says no\n"
        assert site.ask("drain n4 x") == "refused: the node is not one of the job's nodes\n"
        assert site.ask("jobcomment x") == "ok\n"
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    assert (site.bed.share / "asked").read_text() == f"3 {site.job} n2 drain 0 {path}\n3 {site.job} n3 down 0 {path}\n"
    assert site.state("n3") & {"DRAIN", "DOWN"} == set()


def test_a_check_that_hangs_refuses_and_holds_up_nobody(site: Site) -> None:
    check = site.bed.share / "hanging-check"
    check.write_text("#!/bin/sh\n[ $2 = n3 ] || { sleep 4321 & sleep 4321; }\n")
    check.chmod(0o755)
    with site.helper(cap=3, confirm=str(check)):
        command = [sys.executable, str(ATTACKER), "timed", site.socket(site.job, "n1"), "drain n2 x"]
        asking = site.bed.popen(command, node="n1", stdout=subprocess.PIPE)
        site.bed.wait(lambda: sleepers(site), "the check hangs")
        start = time.monotonic()
        assert site.ask("drain n3 x") == "ok\n"
        assert site.ask("jobcomment x") == "ok\n"
        assert time.monotonic() - start < 2
        answer, seconds = json.loads(asking.communicate(timeout=30)[0])
        assert answer == "refused: the site's check did not end in time\n"
        assert 4.5 < seconds < 7
        assert not sleepers(site)
    assert site.state("n2") & {"DRAIN", "DOWN"} == set()


def sleepers(site: Site) -> str:
    return site.bed.run(["pgrep", "-fx", "sleep 4321"], user="root", node="n1", check=False).stdout


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o777),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o644),
        lambda path: path.write_text("no program"),
    ],
    ids=["others may write it", "missing", "not executable", "not a program"],
)
def test_a_check_that_is_no_good_allows_nothing(site: Site, spoil: Callable[[Path], None]) -> None:
    check = site.bed.share / "spoilt-check"
    check.write_text("#!/bin/sh\n")
    check.chmod(0o755)
    spoil(check)
    with site.helper(confirm=str(check)):
        assert site.ask("drain n2 x").startswith("refused: the site's check")
    assert site.untouched()


# --- attacks ------------------------------------------------------------------------------------------------


def test_another_user_does_not_get_in(site: Site) -> None:
    with site.helper():
        assert site.attack("timed", "drain n2 x", user="bob") == "PermissionError"
        # and would not get further if he did
        site.bed.run(["chmod", "0666", site.socket(site.job, "n1")], user="root", node="n1")
        for line in ("drain n2 x", "down n2 x", "nodecomment n2 x", "jobcomment x"):
            assert site.ask(line, user="bob") == NOT_OWNER
        assert "refused to uid 2002: the caller is not the job's owner" in site.log()
        assert site.untouched()


def test_he_cannot_take_the_sockets_place(site: Site) -> None:
    with site.helper():
        path = site.socket(site.job, "n1")
        for command in (
            ["rm", "-f", path],
            ["mv", path, "/tmp/x"],
            ["ln", "-s", "/tmp/x", "/run/torchpass/job9.n1.sock"],
        ):
            for user in ("alice", "bob"):
                assert site.bed.run(command, user=user, node="n1", check=False).returncode != 0
        assert site.ask("drain n2 x") == "ok\n"


@pytest.mark.parametrize("node", ["n4", "n5", "n", "n11", "ctl", "n1,n4", "n[1-5]", "ALL", "*"])
def test_nodes_outside_of_the_job_are_not_touched(site: Site, node: str) -> None:
    with site.helper(cap=9):
        for verb in ("drain", "down", "nodecomment"):
            assert site.ask(f"{verb} {node} x").startswith("refused: ")
        assert site.untouched()


def test_no_line_that_the_parser_refuses_has_an_effect(site: Site) -> None:
    """Injection in every field, zero bytes, long lines: all that test_request.py knows, through the socket."""
    lines = [line + b"\n" for line, _ in REFUSED]
    lines += [line for line, _ in ACCEPTED[:2]]  # without their newline, and then the client waits
    lines += [b"\n", b"drain n2 x\n\n", b"drain n2 x\ndrain n3 x\n", b"drain n2 x\r\n", b"drain n2 x\0\n"]
    lines += [b"x" * 100000, b"\xff" * 700 + b"\n", b"drain n2 " + b"x" * 592 + b"\n"]
    with site.helper(cap=3):
        for start in range(0, len(lines), 20):
            answers = site.attack("ask", input=json.dumps([line.hex() for line in lines[start : start + 20]]))
            assert [answer for answer in answers if not answer.startswith("refused: ")] == []
        assert site.untouched()
        assert site.ask("drain n2 x") == "ok\n"


def test_the_longest_line_is_taken(site: Site) -> None:
    with site.helper():
        text = "x" * 591
        assert site.ask(f"drain n2 {text}") == "ok\n"
        assert site.reason("n2") == f"torchpass job {site.job}: {text}"


@pytest.mark.parametrize("data", ["", "drain n2", "drain n2 x"])
def test_a_truncated_message_has_no_effect(site: Site, data: str) -> None:
    with site.helper():
        assert site.attack("half", data).startswith("refused: ")
        assert site.untouched()


def test_a_slow_client_is_served_and_a_silent_one_is_sent_away(site: Site) -> None:
    with site.helper():
        assert site.attack("slow", "drain n2 slowly") == "ok\n"
        answer, seconds = site.attack("silent")
        assert answer == "refused: no whole line came in time\n"
        assert 1.5 < seconds < 4


def test_dead_clients(site: Site) -> None:
    """They harm nobody, and what they had asked for in full is done."""
    with site.helper():
        for data in ("", "dra", "drain n2 x", "drain n9 x\n", "jobcomment -\n"):
            site.bed.run([sys.executable, str(ATTACKER), "gone", site.socket(site.job, "n1"), data], node="n1")
        assert site.untouched()
        site.bed.run(
            [sys.executable, str(ATTACKER), "gone", site.socket(site.job, "n1"), "drain n2 last will\n"], node="n1"
        )
        site.bed.wait(lambda: "DRAIN" in site.state("n2"), "n2 is drained")


FLOODS = [
    ("bob", "garbage", 1000, 200),
    ("bob", "stall", 1000, 200),
    ("alice", "garbage", 1000, 200),
    ("alice", "foreign", 1000, 200),
    ("alice", "stall", 600, 200),
    ("alice", "drip", 400, 200),
    ("alice", "comments", 1000, 200),
]


@pytest.mark.parametrize(
    ("user", "kind", "count", "threads"), FLOODS, ids=[f"{kind} by {user}" for user, kind, *_ in FLOODS]
)
def test_a_flood_does_not_keep_an_honest_request_waiting(
    site: Site, user: str, kind: str, count: int, threads: int
) -> None:
    with site.helper():
        if user == "bob":
            site.bed.run(["chmod", "0666", site.socket(site.job, "n1")], user="root", node="n1")
        command = [sys.executable, ATTACKER, "flood", site.socket(site.job, "n1"), kind, str(count), str(threads)]
        flood = site.bed.popen(command, user=user, node="n1", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert flood.stdout is not None
        assert flood.stdout.readline() == "started\n"
        time.sleep(0.1)
        answer, seconds = site.attack("timed", "drain n2 in the flood")
        answers = json.loads(flood.communicate(timeout=60)[0])
        assert answer == "ok\n", answers
        assert seconds < 2
        assert sum(answers.values()) >= count
        if kind == "comments":
            assert 10 < answers["ok"] < 60, answers
        else:
            assert "ok" not in answers
        assert site.ask("nodecomment n2 torchpass: afterwards") == "ok\n" or kind == "comments"
        assert len(site.log()) < 100000
    assert site.state("n2") >= {"DRAIN"}
    assert not any("DRAIN" in site.state(node) for node in ("n1", "n3", "n4", "n5"))

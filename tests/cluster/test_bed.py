"""The test bed itself: a real cluster, real faults, and nothing left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Bed, BedError, CommandFailed, compile_in, config
from tests.cluster.bed import fields
from tests.cluster.fixtures import bed_fixture, open_bed
from tests.cluster.project import REPOSITORY

bed = bed_fixture(nodes=3, gpus=2)

SPANK = r"""
#include <slurm/spank.h>
#include <stdio.h>
SPANK_PLUGIN(bedtest, 1);
static int seen(int value, const char *argument, int remote) { (void)value, (void)argument, (void)remote; return 0; }
int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    (void)argc, (void)argv;
    static struct spank_option option = {"bedtest-color", "COLOR", "A colour.", 1, 0, seen};
    return spank_option_register(spank, &option);
}
"""

CLI_FILTER = """
function slurm_cli_setup_defaults(options, early_pass) return slurm.SUCCESS end
function slurm_cli_pre_submit(options, pack_offset)
  if options["job-name"] == "forbidden" then slurm.log_error("not that name"); return slurm.ERROR end
  return slurm.SUCCESS
end
function slurm_cli_post_submit(offset, job_id, step_id) return slurm.SUCCESS end
"""


def build_plugin(version: str, place: Path) -> Path:
    place.chmod(0o755)
    (place / "bedtest.c").write_text(SPANK)
    compile_in(version, ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", "bedtest.so", "bedtest.c"], place)
    return place / "bedtest.so"


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


@pytest.fixture
def whole(bed: Bed) -> Iterator[Bed]:
    """The shared bed for a test that breaks something; whatever it broke is mended afterwards."""
    yield bed
    for node in bed.nodes:
        for mend in (bed.thaw, bed.heal, bed.boot, bed.start_slurmd):
            try:
                mend(node)
            except BedError:
                pass  # it was not broken
    try:
        bed.start_slurmctld()
    except BedError:
        pass
    bed.run(["scontrol", "update", "nodename=ALL", "state=resume"], user="root", check=False)
    bed.run(["scancel", "-u", "alice"], user="root")
    bed.wait(lambda: {bed.node(name)["State"] for name in bed.nodes} == {"IDLE"}, "all nodes idle again")


# --- pure parts --------------------------------------------------------------------------------------


def test_a_line_replaces_the_default_of_its_key_or_of_its_named_entry() -> None:
    ours = ["SlurmdTimeout=15", "KillWait=5", "PartitionName=main Nodes=ALL", "NodeName=n[1-2] CPUs=8"]
    extra = ["slurmdtimeout=3", "PartitionName=main Nodes=n1", "PartitionName=other Nodes=n2"]
    assert list(config.override(ours, extra)) == ["KillWait=5", "NodeName=n[1-2] CPUs=8", *extra]


def test_fields_keeps_equal_signs_of_free_text() -> None:
    text = "JobId=1 JobName=a b\n   JobState=RUNNING Reason=None Dependency=(null)\n   Comment=active=4 Spares=1/2 x\n"
    assert fields(text) == {
        "JobId": "1",
        "JobName": "a b",
        "JobState": "RUNNING",
        "Reason": "None",
        "Dependency": "(null)",
        "Comment": "active=4 Spares=1/2 x",
    }


# --- a cluster ---------------------------------------------------------------------------------------


def test_a_job_of_an_ordinary_user_runs_on_its_nodes_with_its_gpus(bed: Bed) -> None:
    script = "#SBATCH -N 3 --gres=gpu:2\nid -un\nsrun -l sh -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES $(id -un)'\n"
    job = bed.sbatch(script, "-o", "out.%j")
    found = bed.wait_job(job, {"COMPLETED"})
    assert found["NodeList"] == "n[1-3]"
    assert found["UserId"] == "alice(2001)"
    lines = (bed.share / f"out.{job}").read_text().splitlines()
    assert lines[0] == "alice"
    assert sorted(lines[1:]) == ["0: n1 0,1 alice", "1: n2 0,1 alice", "2: n3 0,1 alice"]
    assert bed.node("n1")["Gres"] == "gpu:fake:2"


def test_a_failed_job_is_told_at_once(bed: Bed) -> None:
    job = bed.sbatch("exit 3")
    with pytest.raises(BedError, match="is FAILED, not COMPLETED"):
        bed.wait_job(job, {"COMPLETED"}, 20)


def test_every_node_has_its_own_processes_folders_and_network(bed: Bed) -> None:
    code = "touch /tmp/mine /run/mine /dev/shm/mine; hostname; ls /tmp /run /dev/shm; ip -br addr; ps -e -o comm="
    told = [bed.run(["sh", "-c", code], node=name, user="root").stdout for name in ("n1", "n2")]
    assert "10.77.0.11/24" in told[0]
    assert "10.77.0.12/24" in told[1]
    assert all(text.split()[0] == f"n{number}" for number, text in enumerate(told, 1))
    assert all(text.count("mine") == 3 and text.count("slurmd\n") == 1 for text in told)
    assert "mine" not in bed.run(["ls", "/tmp", "/run", "/dev/shm"], node="n3").stdout
    assert not any(Path(folder, "mine").exists() for folder in ("/tmp", "/run", "/dev/shm"))


def test_what_is_written_outside_the_share_does_not_reach_the_host(bed: Bed) -> None:
    bed.run(["sh", "-c", "echo x > /etc/torchpass-bed-test; echo x > /var/torchpass-bed-test"], user="root")
    assert bed.run(["cat", "/etc/torchpass-bed-test"], node="n2").stdout == "x\n"
    assert not Path("/etc/torchpass-bed-test").exists()
    assert not Path("/var/torchpass-bed-test").exists()


def test_alice_runs_the_projects_python_on_a_node(bed: Bed) -> None:
    code = "import torch, tpwrap, tpwrap.engine._native, os; print(os.getuid(), torch.ones(2).sum().item())"
    done = bed.run(["srun", "-w", "n2", REPOSITORY / ".venv/bin/python", "-c", code], cwd=REPOSITORY)
    assert done.stdout == "2001 2.0\n"


def test_a_closed_folder_shows_only_what_is_exposed() -> None:
    (REPOSITORY / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=REPOSITORY / "build") as closed:  # its mode is 700
        shown, secret = Path(closed, "shown"), Path(closed, "secret")
        for folder in (shown, secret):
            folder.mkdir()
            (folder / "file").write_text("text")
        with open_bed(nodes=1, gpus=0, expose=[shown]) as bed:
            assert bed.run(["ls", closed], node="n1").stdout == "shown\n"
            assert bed.run(["cat", shown / "file"]).stdout == "text"
        assert Path(closed).stat().st_mode & 0o777 == 0o700
        with pytest.raises(BedError, match=r"expose: /\S+ has mode 700: alice could not read it; chmod"):
            Bed(expose=[closed]).start()


def test_a_failed_command_tells_what_it_printed(bed: Bed) -> None:
    with pytest.raises(CommandFailed, match="ended with 7\nout\nerr"):
        bed.run(["sh", "-c", "echo out; echo err >&2; exit 7"])


def test_a_command_past_its_time_is_killed_inside(bed: Bed) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        bed.run(["sleep", "4711"], node="n1", timeout=0.3)
    bed.wait(lambda: "4711" not in bed.run(["ps", "-e", "-o", "args="], node="n1").stdout, "sleep is gone", 2)


def test_signals_and_exit_codes_go_through(bed: Bed) -> None:
    code = "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(5)); print('ready'); signal.pause()"
    process = bed.popen(python(code), node="n1", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 5
    process.stdout.close()
    process = bed.popen(["sleep", "1000"])
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM


def test_the_world_outlives_askers_that_talk_nonsense(bed: Bed) -> None:
    for words in (b"", b"[\n", b'["nonsense"]\n', b'["kill"]\n'):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(f"{bed.dir}/control")
            line.sendall(words)
    assert bed.run(["hostname"], node="n1").stdout == "n1\n"


# --- faults ------------------------------------------------------------------------------------------

LISTENER = """
import socket, sys
server = socket.create_server(("", 5000)); print("listening")
line, _ = server.accept()
while data := line.recv(100): line.sendall(data)
"""
CLIENT = """
import socket, sys
line = socket.create_connection((sys.argv[1], 5000)); line.settimeout(0.5)
for word in sys.stdin:
    line.sendall(word.encode())
    try: print(repr(line.recv(100).decode()), flush=True)
    except TimeoutError: print("silence", flush=True)
"""


@pytest.fixture
def talk(bed: Bed) -> Iterator[Callable[[str, str], str]]:
    """Talk over one connection from n1 to a server on a node: what comes back within half a second."""
    processes: dict[str, list[subprocess.Popen[str]]] = {}

    def say(node: str, word: str) -> str:
        if node not in processes:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            server = bed.popen(python(LISTENER), node=node, **pipes)
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            processes[node] = [server, bed.popen([*python(CLIENT), node], node="n1", **pipes)]
        client = processes[node][1]
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(word + "\n")
        client.stdin.flush()
        return client.stdout.readline().strip()

    yield say
    for pair in processes.values():
        for process in pair:
            process.kill()
            process.communicate()


def test_a_killed_node_falls_silent_and_boots_again(whole: Bed, talk: Callable[[str, str], str]) -> None:
    assert talk("n2", "a") == "'a\\n'"
    whole.kill("n2")
    assert talk("n2", "b") == "silence"  # neither an end nor a reset of the connection
    with pytest.raises(BedError, match="n2 is dead; boot it first"):
        whole.run(["true"], node="n2")
    whole.boot("n2")
    assert whole.run(["ls", "-A", "/run"], node="n2").stdout.split() == ["munge", "slurmd.pid"]
    assert whole.run(["srun", "-w", "n2", "hostname"]).stdout == "n2\n"


def test_a_silent_cut_loses_both_ways_and_heals(whole: Bed, talk: Callable[[str, str], str]) -> None:
    assert talk("n2", "a") == "'a\\n'"
    whole.cut("n2")
    assert talk("n2", "b") == "silence"
    assert "LOWER_UP" in whole.run(["ip", "link", "show", "eth0"], node="n2").stdout
    receive = "import socket; s = socket.socket(2, 2); s.bind(('', 5001)); print('ready')\n"
    receive += "while True: print(s.recv(9).decode())"
    send = "import socket, sys; socket.socket(2, 2).sendto(sys.argv[1].encode(), ('10.77.0.1', 5001))"
    with whole.popen(python(receive), stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        whole.run([*python(send), "lost"], node="n2")
        assert select.select([receiver.stdout], [], [], 0.3)[0] == []
        whole.heal("n2")
        whole.run([*python(send), "heard"], node="n2")
        assert receiver.stdout.readline() == "heard\n"
        receiver.kill()
    whole.wait(lambda: talk("n2", "c") != "silence", "the connection lives on", 5)


def test_a_cut_with_carrier_loss_is_seen_by_the_node(whole: Bed) -> None:
    whole.cut("n3", carrier=True)
    assert "NO-CARRIER" in whole.run(["ip", "link", "show", "eth0"], node="n3").stdout
    whole.heal("n3")
    assert "LOWER_UP" in whole.run(["ip", "link", "show", "eth0"], node="n3").stdout
    assert whole.run(["srun", "-w", "n3", "hostname"]).stdout == "n3\n"


def test_a_frozen_node_stands_still_and_goes_on(whole: Bed) -> None:
    count = whole.share / "count"
    tick = f"import time, pathlib; p = pathlib.Path({str(count)!r})\n"
    ticking = whole.popen(python(tick + "for i in range(10**6): p.write_text(str(i)); time.sleep(0.01)"), node="n2")
    stopped = whole.popen(["sleep", "1000"], node="n2")

    def sleeper() -> str:
        return whole.run(["ps", "-C", "sleep", "-o", "stat="], node="n2", check=False).stdout

    whole.wait(sleeper, "it sleeps")
    whole.run(["pkill", "-STOP", "sleep"], node="n2")
    whole.wait(lambda: sleeper().startswith("T"), "it is stopped")
    whole.wait(lambda: count.exists() and count.read_text(), "it ticks")
    whole.freeze("n2")
    before = count.read_text()
    with pytest.raises(BedError, match="n2 is frozen; thaw it first"):
        whole.kill_slurmd("n2")
    time.sleep(0.2)
    assert count.read_text() == before
    whole.thaw("n2")
    whole.wait(lambda: count.read_text() != before, "it ticks again", 2)
    assert sleeper().startswith("T")  # it was stopped before, and not by us
    for process in (ticking, stopped):
        process.kill()
        process.wait()


def test_steps_outlive_their_slurmd(whole: Bed) -> None:
    with whole.popen(["srun", "-w", "n2", "sh", "-c", "echo go; sleep 1; echo $?"], stdout=subprocess.PIPE) as step:
        assert step.stdout is not None
        assert step.stdout.readline() == "go\n"
        whole.kill_slurmd("n2")
        assert "slurmd\n" not in whole.run(["ps", "-e", "-o", "comm="], node="n2").stdout
        assert step.stdout.readline() == "0\n"
        whole.start_slurmd("n2")
        with pytest.raises(BedError, match="slurmd runs already"):
            whole.start_slurmd("n2")
        assert step.wait(20) == 0
    assert whole.run(["srun", "-w", "n2", "hostname"]).stdout == "n2\n"


def test_the_controller_comes_back_with_its_jobs(whole: Bed) -> None:
    job = whole.sbatch("sleep 60")
    whole.wait_job(job, {"RUNNING"})
    running, state = time.time(), whole.dir / "state/job_state"
    whole.wait(lambda: state.stat().st_mtime > running, "the controller saves its state, as it does every 5 s", 10)
    whole.kill_slurmctld()
    with pytest.raises(BedError, match="slurmctld does not run"):
        whole.kill_slurmctld()
    whole.start_slurmctld()
    assert whole.job(job)["JobState"] == "RUNNING"


# --- configuration -----------------------------------------------------------------------------------


def check_extensions(version: str, place: Path) -> None:
    """Plugins, prolog, epilog, filters and lines of slurm.conf take effect."""
    plugin = build_plugin(version, place)
    report = "#!/bin/sh\necho $SLURM_JOB_USER >> /run/told\n"
    options = {"plugin": [f"optional {plugin}"], "lua": {"cli_filter": CLI_FILTER}, "expose": [place]}
    with open_bed(nodes=2, version=version, prolog=report, epilog=report, slurm_conf=["KillWait=77"], **options) as bed:
        assert "--bedtest-color=COLOR" in bed.run(["sbatch", "--help"]).stdout
        with pytest.raises(CommandFailed, match="not that name"):
            bed.run(["srun", "-J", "forbidden", "true"])
        assert bed.run(["srun", "--bedtest-color=red", "-w", "n2", "cat", "/run/told"]).stdout == "alice\n"
        bed.wait(lambda: bed.run(["cat", "/run/told"], node="n2").stdout == "alice\n" * 2, "the epilog ran", 5)
        assert "KillWait                = 77 sec" in bed.run(["scontrol", "show", "config"]).stdout


def test_plugins_scripts_and_settings_take_effect(tmp_path: Path) -> None:
    check_extensions("22.05", tmp_path)


def check_accounting(version: str) -> None:
    with open_bed(nodes=2, gpus=0, version=version, dbd=True) as bed:
        bed.run(["srun", "-N2", "-J", "counted", "true"])

        def sacct() -> bool:
            return "counted|lab|alice" in bed.run(["sacct", "-n", "-P", "-X", "-o", "jobname,account,user"]).stdout

        bed.wait(sacct, "sacct knows the job", 10)


def test_accounting() -> None:
    check_accounting("22.05")


# --- side by side, and the end -----------------------------------------------------------------------


def test_beds_side_by_side_do_not_meet(bed: Bed) -> None:
    with open_bed(nodes=2) as other:
        assert other.run(["hostname", "-i"], node="n1").stdout == bed.run(["hostname", "-i"], node="n1").stdout
        other.kill("n1")
        assert bed.run(["srun", "-w", "n1", "hostname"]).stdout == "n1\n"
        assert not other.share.samefile(bed.share)


def host_state() -> dict[str, object]:
    """What a bed could leave behind on the host."""
    return {
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "network namespaces": sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else [],
        "cgroups": sorted(str(path) for path in Path("/sys/fs/cgroup").glob("**/*slurm*")),
    }


def descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


RUNNER = """
import json, os, time
from tests.cluster import Bed
bed = Bed(nodes=3)
bed.start()
bed.popen(["srun", "-N3", "sleep", "1000"])
bed.popen(["sleep", "1000"], node="n2")
for node in ("n1", "n2", "n3"):
    bed.wait(lambda: "sleep" in bed.run(["ps", "-u", "alice", "-o", "comm="], node=node, check=False).stdout, "it runs")
print(json.dumps({"dir": str(bed.dir), "keeper": bed._keeper.pid}), flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_when_the_runner_is_killed(bed: Bed) -> None:
    before = host_state()
    runner = subprocess.Popen(python(RUNNER), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert runner.stdout is not None
    told = json.loads(runner.stdout.readline())
    processes = descendants(told["keeper"])
    assert len(processes) > 15
    os.killpg(runner.pid, signal.SIGKILL)
    runner.communicate()
    bed.wait(lambda: not Path(f"/proc/{told['keeper']}").exists(), "the keeper is done", 5)
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []
    assert not Path(told["dir"]).exists()
    assert host_state() == before


def test_a_killed_keeper_takes_its_world_along() -> None:
    bed = Bed(nodes=2, gpus=0)
    bed.start()
    assert bed._keeper is not None
    processes = descendants(bed._keeper.pid)
    bed._keeper.kill()
    end = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in processes[1:]) and time.monotonic() < end:
        time.sleep(0.01)
    assert [pid for pid in processes[1:] if Path(f"/proc/{pid}").exists()] == []
    bed.stop()
    assert not bed.dir.exists()


def test_an_error_at_the_start_is_told_and_cleaned_up() -> None:
    bed = Bed(nodes=2, slurm_conf=["SelectType=select/nonsense"])
    with pytest.raises(BedError, match=r"slurmctld ended.*\n(.*\n)*.*select/nonsense"):
        bed.start()
    assert not bed.dir.exists()


def test_without_root_one_line_says_so() -> None:
    code = "import os; os.setgid(65534); os.setuid(65534)\nfrom tests.cluster import Bed, BedUnavailable\n"
    code += "try: Bed().start()\nexcept BedUnavailable as reason: print(reason)"
    environment = {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(["/usr/bin/python3", "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("the Slurm test bed needs root\n", "")


def test_impossible_beds_skip_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHPASS_REQUIRE_BED", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"Slurm 1\.0 cannot be had"), open_bed(version="1.0"):
        pass
    monkeypatch.setenv("TORCHPASS_REQUIRE_BED", "1")
    with pytest.raises(pytest.fail.Exception, match=r"Slurm 1\.0 cannot be had"), open_bed(version="1.0"):
        pass


def test_the_command_plays_with_a_bed() -> None:
    name = f"test-{os.getpid()}"

    def tool(*words: str) -> str:
        command = [sys.executable, "-m", "tests.cluster", "--bed", name, *words]
        done = subprocess.run(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert "start` boots one" in tool("kill", "n1")
    try:
        assert "2 nodes are idle" in tool("start", "--nodes", "2")
        assert tool("as", "bob", "srun", "-w", "n2", "id", "-un") == "bob\n"
        assert tool("sh", "--node", "n2", "hostname") == "n2\n"
        assert tool("kill", "n2") == ""
        assert tool("as", "alice@n2", "hostname") == "n2 is dead; boot it first\n"
        assert tool("boot", "n2") == ""
        assert tool("as", "alice@n2", "hostname") == "n2\n"
        assert "--- slurmctld.log" in tool("logs")
    finally:
        tool("stop")
    assert not Path(f"/tmp/torchpass-bed.{name}").exists()


# --- other versions ----------------------------------------------------------------------------------

OTHERS = pytest.mark.parametrize("version", ["24.11", "26.05"])


@pytest.mark.slurm_matrix
@pytest.mark.timeout(600)  # the first time makes the version's root
@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_slurm_takes_a_dead_node_out(version: str) -> None:
    settings = ["SlurmdTimeout=2", "MessageTimeout=2", "TCPTimeout=1", "ReturnToService=2"]
    with open_bed(nodes=2, gpus=0, version=version, slurm_conf=settings) as bed:
        bed.kill("n2")
        bed.wait(lambda: bed.node("n2")["State"].startswith("DOWN"), "n2 is DOWN", 30)
        bed.boot("n2")
        bed.wait(lambda: bed.node("n2")["State"] == "IDLE", "n2 is IDLE again", 30)


@pytest.mark.slurm_matrix
@pytest.mark.timeout(600)
@OTHERS
def test_version_has_extensions(version: str, tmp_path: Path) -> None:
    check_extensions(version, tmp_path)


@pytest.mark.slurm_matrix
@pytest.mark.timeout(600)
@OTHERS
def test_version_has_accounting(version: str) -> None:
    check_accounting(version)


@pytest.mark.slurm_matrix
@pytest.mark.timeout(600)
@OTHERS
def test_version_runs_jobs_python_and_faults(version: str) -> None:
    with open_bed(nodes=2, gpus=2, version=version) as bed:
        assert bed.node("n1")["Version"].startswith(version)
        bed.kill("n2")
        bed.boot("n2")
        bed.kill_slurmctld()
        bed.start_slurmctld()
        bed.wait(lambda: {bed.node(name)["State"] for name in bed.nodes} == {"IDLE"}, "both are IDLE again")
        script = "srun -l sh -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES'"
        job = bed.sbatch(script, "-N2", "--gres=gpu:2", "-o", "out", "--comment=active=2 Spares=1")
        assert bed.wait_job(job, {"COMPLETED"})["Comment"] == "active=2 Spares=1"
        assert sorted((bed.share / "out").read_text().splitlines()) == ["0: n1 0,1", "1: n2 0,1"]
        test_alice_runs_the_projects_python_on_a_node(bed)

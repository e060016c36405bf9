"""`torchpass doctor`: what of TorchPass works on this host, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import shutil
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tpwrap.slurm import commands, helper
from tpwrap.slurm.commands import SlurmError

Level: TypeAlias = Literal["ok", "warning", "error"]
_COMMANDS = ("srun", "sbatch", "scontrol", "squeue", "scancel")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. fix: what to do, "" if nothing."""

    level: Level
    what: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Facts:
    """What this host says; gathered by `look`, judged by `judge`."""

    torch: bool = False
    engine: bool = False
    missing_commands: list[str] = field(default_factory=list)
    controller: str = ""
    """what is wrong with slurmctld; "" if it answers"""
    config: dict[str, str] = field(default_factory=dict)
    option: bool = False
    """srun knows --torchpass-spares"""
    address: str = ""
    """of this host's own name"""
    job: int | None = None
    key: bool = False
    socket: str = ""
    """of the node helper in this job: "missing", "closed" (nobody listens) or "open"; "" outside a job"""
    private: bool = False
    """the prolog has made the job's directory on this node"""


def look(environment: Mapping[str, str]) -> Facts:
    """Ask this host. Takes a second; longer where slurmctld does not answer."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    problem, config, option = "", {}, False
    if not missing:
        try:
            config = commands.config()
        except SlurmError as e:
            problem = str(e)
        try:
            option = "--torchpass-spares" in commands.run(["srun", "--help"])
        except SlurmError:
            option = False
    job, node = environment.get("SLURM_JOB_ID"), environment.get("SLURMD_NODENAME", "")
    number = int(job) if job and job.isdigit() else None
    return Facts(
        torch=importlib.util.find_spec("torch") is not None,
        engine=importlib.util.find_spec("tpwrap.engine._native") is not None,
        missing_commands=missing,
        controller=problem,
        config=config,
        option=option,
        address=_own_address(),
        job=number,
        key="TORCHPASS_KEY" in environment,
        socket=_helper(number, node) if number is not None and node else "",
        private=number is not None and (helper.RUN / f"job{number}.{node}").is_dir(),
    )


def judge(facts: Facts) -> list[Finding]:
    """What the facts mean, in the order in which one would mend them."""
    findings = [_engine(facts)]
    if facts.missing_commands:
        names = ", ".join(facts.missing_commands)
        fix = "install Slurm's client here; without Slurm use tpwrap --nodes N --spares M"
        return [*findings, Finding("error", "Slurm's commands", f"{names} not found", fix)]
    if facts.controller:
        return [*findings, Finding("error", "slurmctld", facts.controller, "start slurmctld, or look at SLURM_CONF")]
    findings.append(Finding("ok", "slurmctld", f"answers, Slurm {facts.config.get('SLURM_VERSION', '?')}"))
    if facts.option:
        findings.append(Finding("ok", "plugin", "srun knows --torchpass-spares"))
    else:
        fix = "add the line 'optional …/torchpass.so' to plugstack.conf (docs/install-slurm.md)"
        findings.append(Finding("error", "plugin", "srun does not know --torchpass-spares", fix))
    findings.append(_prolog(facts))
    findings.append(_address(facts))
    if facts.job is None:
        hint = "srun -N 1 --torchpass-spares=1 torchpass doctor"
        findings.append(Finding("ok", "job", "this is not a job; to check the nodes, too, run: " + hint))
    else:
        findings += _in_job(facts)
    return findings


def _engine(facts: Facts) -> Finding:
    if not facts.torch:
        return Finding("error", "engine", "torch is not importable here", "use the Python that the training uses")
    if not facts.engine:
        fix = "make setup, or pip install --no-build-isolation ."
        return Finding("error", "engine", "its C++ part is not built", fix)
    return Finding("ok", "engine", "built")


def _prolog(facts: Facts) -> Finding:
    flags = {flag.strip().lower() for flag in facts.config.get("PrologFlags", "").split(",")}
    if flags & {"contain", "alloc"}:
        return Finding("ok", "prolog", "runs on every node when the job starts, spares included")
    fix = "set PrologFlags=Alloc in slurm.conf, or spares are neither checked nor can they drain a node"
    return Finding("warning", "prolog", "runs on a node only when a step does", fix)


def _address(facts: Facts) -> Finding:
    if facts.address and not ipaddress.ip_address(facts.address).is_loopback:
        return Finding("ok", "address", f"this host's name is {facts.address}")
    found = f"this host's own name is {facts.address or 'not known'}"
    return Finding("warning", "address", found, "have it resolve to the address that other nodes use")


def _in_job(facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    if facts.key:
        found.append(Finding("ok", "step", "srun gave the step a key, keeps it alive and returns the job's verdict"))
    else:
        fix = "submit with --torchpass-spares=N; else give srun --no-kill --kill-on-bad-exit=0 --wait=0"
        found.append(Finding("warning", "step", "srun's plugin has not prepared this step", fix))
    if facts.socket == "open":
        found.append(Finding("ok", "node helper", "listens: a lost node will be drained"))
    else:
        what = "does not listen" if facts.socket == "closed" else "is not there"
        fix = "PrologFlags=Alloc and helper=yes for the plugin (docs/install-slurm.md); without it nothing is drained"
        found.append(Finding("warning", "node helper", what, fix))
    if facts.private:
        found.append(Finding("ok", "directory", "the prolog has made a private one for this job"))
    return found


def _own_address() -> str:
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _helper(job: int, node: str) -> str:
    path = helper.address(job, node)
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return "missing"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
    except FileNotFoundError:
        return "missing"
    except OSError:
        return "closed"
    return "open"

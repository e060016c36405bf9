"""The Slurm step that this process is a task of, as its environment tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tpwrap.core.config import ConfigError
from tpwrap.slurm import hostlist


@dataclass(frozen=True)
class Step:
    """A task's view of its step; the same for all tasks but for `node`, `local_id` and `block`."""

    job_id: int
    slurm_id: str
    """how Slurm's commands must be told of the job: of an array, the number alone may mean all its elements"""
    step_id: str
    restarts: int
    """how often Slurm has requeued the job"""
    names: tuple[str, ...]
    """the nodes of the step; a node's index in it is its number in the job"""
    node: int
    local_id: int
    tasks_per_node: int
    first_of_job: int | None
    """the job's first node, where Slurm runs a batch script; None if it is not part of the step"""
    launched_from: str
    """address of the host that srun runs on; "" where unknown"""
    block: str
    """the switches above this node; "" where Slurm knows no topology"""

    @property
    def name(self) -> str:
        return self.names[self.node]

    @property
    def tag(self) -> str:
        """Names this run of the step, and no other one on the cluster."""
        return f"{self.job_id}.{self.step_id}" + (f".r{self.restarts}" if self.restarts else "")


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process. (A batch script has a job id, but no step.)"""
    return "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment


def read(environment: Mapping[str, str]) -> Step:
    """ConfigError where the step has a shape that tpwrap cannot use."""
    try:
        job_names = hostlist.expand(environment.get("SLURM_JOB_NODELIST", ""))
        names = hostlist.expand(environment["SLURM_STEP_NODELIST"])
        name = environment.get("SLURMD_NODENAME") or names[int(environment["SLURM_NODEID"])]
        node = names.index(name)
        step = Step(
            job_id=int(environment["SLURM_JOB_ID"]),
            slurm_id=_slurm_id(environment),
            step_id=environment["SLURM_STEP_ID"],
            restarts=int(environment.get("SLURM_RESTART_COUNT") or 0),
            names=tuple(names),
            node=node,
            local_id=int(environment.get("SLURM_LOCALID") or 0),
            tasks_per_node=tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"]),
            first_of_job=names.index(job_names[0]) if job_names and job_names[0] in names else None,
            launched_from=environment.get("SLURM_LAUNCH_NODE_IPADDR", ""),
            block=_block(environment),
        )
    except (KeyError, ValueError, IndexError) as e:
        if isinstance(e, ConfigError):
            raise
        what = f"{e.args[0]} is missing" if isinstance(e, KeyError) else str(e)
        raise ConfigError(f"this does not look like a task of srun ({what}); start it with: srun tpwrap …") from None
    return step


def tasks_per_node(text: str) -> int:
    """'2(x5)' -> 2. ConfigError if nodes have different numbers: every node must be able to replace any other."""
    counts = {int(part) for part in re.sub(r"\(x\d+\)", "", text).split(",")}
    if len(counts) != 1:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE is {text}: nodes with different numbers of tasks cannot replace each other; "
            "ask for --ntasks-per-node=N"
        )
    return counts.pop()


def _slurm_id(environment: Mapping[str, str]) -> str:
    array, index = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environment["SLURM_JOB_ID"]


def _block(environment: Mapping[str, str]) -> str:
    """'top.s1.n3' with pattern 'switch.switch.node' -> 'top.s1'."""
    address, pattern = environment.get("SLURM_TOPOLOGY_ADDR", ""), environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    if not pattern.endswith(".node") or address.count(".") != pattern.count("."):
        return ""
    return address.rpartition(".")[0]

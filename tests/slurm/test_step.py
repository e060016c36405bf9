from __future__ import annotations

import pytest

from tpwrap.core.config import ConfigError, Settings, Source, merge
from tpwrap.launch.slurm import coordinating_node, ports, settings_of_step
from tpwrap.slurm.step import Step, is_task, read, tasks_per_node

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_JOB_NODELIST": "n[1-5]",
    "SLURM_STEP_NODELIST": "n[1-5]",
    "SLURMD_NODENAME": "n2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x5)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.11",
    "SLURM_TOPOLOGY_ADDR": "top.s1.n2",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}


def test_a_task_of_srun() -> None:
    assert is_task(TASK)
    step = read(TASK)
    assert (step.job_id, step.name, step.node, step.local_id, step.tasks_per_node) == (7, "n2", 1, 1, 2)
    assert (step.first_of_job, step.launched_from, step.block, step.tag) == (0, "10.77.0.11", "top.s1", "7.0")
    assert read({**TASK, "SLURM_RESTART_COUNT": "2"}).tag == "7.0.r2"
    assert step.slurm_id == "7"
    assert read({**TASK, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}).slurm_id == "5_3"


def test_a_batch_script_is_no_task() -> None:
    assert not is_task({name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"})


def test_a_step_on_a_part_of_the_job() -> None:
    step = read({**TASK, "SLURM_STEP_NODELIST": "n[2-5]"})
    assert (step.node, step.first_of_job) == (0, None)


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_TOPOLOGY_ADDR": "n2", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"},
        {"SLURM_TOPOLOGY_ADDR": "", "SLURM_TOPOLOGY_ADDR_PATTERN": ""},
        {"SLURM_TOPOLOGY_ADDR": "a.b.c.d"},
    ],
)
def test_no_topology(change: dict[str, str]) -> None:
    assert read({**TASK, **change}).block == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_STEP_NODELIST": "n[1-"}, "srun tpwrap"),
        ({"SLURMD_NODENAME": "x9"}, "srun tpwrap"),
        ({"SLURM_JOB_ID": "seven"}, "srun tpwrap"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, "--ntasks-per-node"),
    ],
)
def test_a_step_that_cannot_be_used(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read({**TASK, **change})


def test_tasks_per_node() -> None:
    assert tasks_per_node("8(x4)") == 8
    assert tasks_per_node("1") == 1
    assert tasks_per_node("2,2(x3)") == 2


def settings(**values: object) -> Settings:
    return merge([Source("--{dashed} (command line)", values)])


def sizes(step: Step, **values: object) -> tuple[int, int]:
    config = settings_of_step(settings(**values), step).config
    return config.nodes, config.nproc_per_node


def test_sizes_come_from_the_step() -> None:
    assert sizes(read(TASK), spares=2) == (3, 2)
    assert sizes(read({**TASK, "SLURM_STEP_TASKS_PER_NODE": "1(x5)"}), spares=1, nproc_per_node=8) == (4, 8)
    assert sizes(read(TASK), spares=2, nodes=3, nproc_per_node=2) == (3, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"spares": 5}, "--spares .*leave none of the 5 nodes"),
        ({"spares": 1, "nodes": 3}, "--nodes .*leave it out"),
        ({"nproc_per_node": 4}, "--nproc-per-node .*srun started 2 tasks"),
    ],
)
def test_sizes_that_contradict_the_step(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sizes(read(TASK), **values)


def test_who_coordinates() -> None:
    step = read(TASK)
    assert coordinating_node(settings(), step) == 0
    assert coordinating_node(settings(), read({**TASK, "SLURM_STEP_NODELIST": "n[2-5]"})) == 3
    assert coordinating_node(settings(coordinator="n3"), step) == 2
    with pytest.raises(ConfigError, match="x is no node of this step"):
        coordinating_node(settings(coordinator="x"), step)


def test_ports_follow_from_the_key() -> None:
    assert ports(b"a" * 32) == ports(b"a" * 32)
    assert ports(b"a" * 32) != ports(b"b" * 32)
    assert len(set(ports(b"a" * 32))) > 4
    assert all(20_000 <= port < 32_000 for port in ports(b"c" * 32))

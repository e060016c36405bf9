from __future__ import annotations

from dataclasses import replace

from tpwrap.slurm.doctor import Facts, judge

HEALTHY = Facts(
    torch=True,
    engine=True,
    config={"SLURM_VERSION": "24.11.5", "PrologFlags": "Alloc,Contain"},
    option=True,
    address="10.77.0.11",
    job=7,
    key=True,
    socket="open",
    private=True,
)


def levels(facts: Facts) -> dict[str, str]:
    return {one.what: one.level for one in judge(facts)}


def test_all_well() -> None:
    assert set(levels(HEALTHY).values()) == {"ok"}
    assert "Slurm 24.11.5" in judge(HEALTHY)[1].found


def test_what_is_wrong_is_named_with_its_fix() -> None:
    for facts, what, level in (
        (replace(HEALTHY, torch=False), "engine", "error"),
        (replace(HEALTHY, engine=False), "engine", "error"),
        (replace(HEALTHY, missing_commands=["srun"]), "Slurm's commands", "error"),
        (replace(HEALTHY, controller="Unable to contact slurm controller"), "slurmctld", "error"),
        (replace(HEALTHY, option=False), "plugin", "error"),
        (replace(HEALTHY, config={"PrologFlags": "(null)"}), "prolog", "warning"),
        (replace(HEALTHY, address="127.0.1.1"), "address", "warning"),
        (replace(HEALTHY, address=""), "address", "warning"),
        (replace(HEALTHY, key=False), "step", "warning"),
        (replace(HEALTHY, socket="closed"), "node helper", "warning"),
        (replace(HEALTHY, socket="missing"), "node helper", "warning"),
    ):
        found = [one for one in judge(facts) if one.level != "ok"]
        assert [(one.what, one.level) for one in found] == [(what, level)]
        assert found[0].fix


def test_outside_a_job_it_says_how_to_check_the_nodes() -> None:
    assert "srun -N 1 --torchpass-spares=1 torchpass doctor" in judge(replace(HEALTHY, job=None))[-1].found

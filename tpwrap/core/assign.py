"""What a worker is told about its rank: environment variables and the faults it shall inject."""

from __future__ import annotations

from collections.abc import Sequence

from tpwrap.core.faults import Fault
from tpwrap.core.job import Job
from tpwrap.core.placement import Place


def environment(job: Job, rank: int, slot: int, store: str, run_id: str) -> dict[str, str]:
    """The variables that torchrun sets, with the same meaning, and what the engine must know of the job.

    GROUP_RANK stays what it was at the start, wherever the rank runs now: scripts and libraries take it for
    a property of the rank. LOCAL_RANK is the slot: it chooses the device.
    """
    host, _, port = store.rpartition(":")
    world = str(job.world_size)
    strict = {"TORCHPASS_STRICT": "1"} if job.strict else {}
    return {
        **strict,
        "TORCHPASS_CHECK_EVERY": str(job.check_every),
        "RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(slot),
        "LOCAL_WORLD_SIZE": str(job.nproc_per_node),
        "GROUP_RANK": str(rank // job.nproc_per_node),
        "GROUP_WORLD_SIZE": str(job.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run_id,
    }


def faults_for(
    faults: Sequence[Fault], fired: frozenset[int], rank: int, place: Place
) -> list[tuple[int, str]]:
    """The faults still to fire that concern this rank, or this node if the rank is in its first slot."""
    node, slot = place
    return [
        (number, str(fault))
        for number, fault in enumerate(faults)
        if number not in fired
        and (fault.index == rank if fault.target == "rank" else fault.index == node and slot == 0)
    ]

"""What a job is made of: fixed when it starts, the same for everyone who decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpwrap.core.faults import Fault

Unit = Literal["node", "rank"]


@dataclass(frozen=True)
class Job:
    """`nodes` of the nodes train at the start, `spares` of them wait (`tpwrap.core.arrangement` says which)."""

    nodes: int
    nproc_per_node: int = 1
    spares: int = 0
    unit: Unit = "node"
    """what moves when a node is lost: all its ranks to one node, or each rank to any spare slot"""
    warm: bool = True
    """keep a warm worker beside every active one (spare slots always have one)"""
    failure_timeout: float = 10.0
    strict: bool = False
    """end the job when something of the script is found not to be protected"""
    check_every: int = 0
    """updates after which replicas are compared, again and again; 0: only after recoveries"""
    faults: tuple[Fault, ...] = ()
    """failures to inject, for rehearsals and tests; the index is the fault's id"""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes: {self.nodes} cannot train anything; give 1 or more")
        if self.nproc_per_node < 1:
            raise ValueError(f"nproc_per_node: {self.nproc_per_node} leaves no worker; give 1 or more")
        if self.spares < 0:
            raise ValueError(f"spares: {self.spares} is negative; give 0 or more")
        if self.check_every < 0:
            raise ValueError(f"check_every: {self.check_every} is negative; give 0 or more")
        if self.unit not in ("node", "rank"):
            raise ValueError(f"unit: {self.unit!r} is unknown; give 'node' or 'rank'")
        for fault in self.faults:
            limit = self.world_size if fault.target == "rank" else self.total_nodes
            if fault.index >= limit:
                raise ValueError(
                    f"inject: {str(fault)!r}: {fault.target}={fault.index} is outside this job; "
                    f"give {fault.target}=0 to {fault.target}={limit - 1}"
                )

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node

    @property
    def total_nodes(self) -> int:
        return self.nodes + self.spares

    @property
    def sidecar_copies(self) -> int:
        """On how many other nodes a rank's sidecar is kept: as many as the nodes that may be lost."""
        return min(max(1, self.spares), self.total_nodes - 1)

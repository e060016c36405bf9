"""Which nodes train at the start and which wait as spares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """Where a node is and how it is, as far as its supervisor can tell.

    block: nodes with the same text are close to each other (one switch, one NVLink domain); "" where unknown.
    vital: what runs here that the job can hardly do without ("the batch script"); "" if nothing.
    sick: what a health check found; "" if nothing.
    """

    block: str = ""
    vital: str = ""
    sick: str = ""


@dataclass(frozen=True)
class Arrangement:
    training: list[int]
    """in the order of the ranks"""
    spares: list[int]
    reason: str


def arrange(sites: Mapping[int, Site], training: int) -> Arrangement:
    """Choose `training` of the nodes; the others are spares. `sites` holds at least that many.

    * A sick node trains only if there are too few others.
    * The node of the batch script or the coordinator is the first spare: what has most to lose should do least.
    * The other spares are spread over the blocks, so that a lost node finds one close by.
    * Ranks go block by block, so that neighbours in rank are neighbours in the network.
    """
    sick = [node for node in sorted(sites) if sites[node].sick]
    vital = [node for node in sorted(sites) if sites[node].vital and not sites[node].sick]
    spares = (sick + vital)[: len(sites) - training]
    while len(spares) < len(sites) - training:
        spares.append(_next_spare(sites, spares))
    first = {site.block: node for node, site in sorted(sites.items(), reverse=True)}
    chosen = sorted(
        (node for node in sites if node not in spares), key=lambda node: (first[sites[node].block], node)
    )
    return Arrangement(chosen, sorted(spares), _reason(sites, chosen, spares))


def _next_spare(sites: Mapping[int, Site], spares: Sequence[int]) -> int:
    """The last node of the block that has most training nodes for each spare it would then have."""
    blocks: dict[str, list[int]] = {}
    for node, site in sorted(sites.items()):
        blocks.setdefault(site.block, []).append(node)

    def need(block: str) -> tuple[float, int]:
        have = [node for node in blocks[block] if node in spares]
        left = len(blocks[block]) - len(have)
        return left / (len(have) + 1), max(blocks[block])

    block = max((block for block in blocks if not set(blocks[block]) <= set(spares)), key=need)
    return max(node for node in blocks[block] if node not in spares)


def _reason(sites: Mapping[int, Site], training: Sequence[int], spares: Sequence[int]) -> str:
    parts: list[str] = []
    for node in sorted(sites):
        site = sites[node]
        if site.sick and node in spares:
            parts.append(f"node {node} holds no rank, because it is sick ({site.sick})")
        elif site.sick:
            parts.append(f"node {node} is sick ({site.sick}), but too few healthy nodes are there to spare it")
        elif site.vital and node in spares:
            parts.append(f"node {node} is a spare, because of {site.vital} there")
    blocks = {site.block for site in sites.values()}
    if len(blocks) > 1 and spares:
        parts.append(f"spares are spread over {len(blocks)} network blocks")
    return "; ".join(parts) or "the first nodes train, the last ones are spares"


def closeness(sites: Mapping[int, Site], lost: int, candidate: int) -> tuple[bool, bool, bool, int]:
    """Sort key for who replaces the node `lost`: healthy, not vital, in the same block, lowest number."""
    site = sites.get(candidate, Site())
    return bool(site.sick), bool(site.vital), site.block != sites.get(lost, Site()).block, candidate

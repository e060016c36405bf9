"""The table: rows of {parallelism} x {how it trains} x {when a rank dies}, and the faults of a row."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tests.parallel import pairwise
from tests.parallel.facts import FACTORS, KINDS, Kind, left_out


class Case(NamedTuple):
    """One row."""

    number: int
    row: pairwise.Row

    @property
    def kind(self) -> Kind:
        return KINDS[self.row["kind"]]

    @property
    def configuration(self) -> pairwise.Row:
        """Everything but the failure: rows with the same one share their undisturbed run."""
        return {factor: value for factor, value in self.row.items() if factor != "phase"}

    @property
    def victims(self) -> tuple[int, ...]:
        """Never all that hold the same."""
        replicas = self.kind.replicas
        if self.row["phase"] != "two":
            return (self.number % self.kind.ranks,)
        if len(replicas) == 1:
            return 1, 2
        turn = self.number % 2
        return replicas[0][turn], replicas[1][1 - turn]

    def faults(self, updates: int) -> list[str]:
        """updates: how many there are in the run (fewer than steps where a scaler skips some)."""
        when = {
            "setup": "phase=setup",
            "first": "step=0 phase=collective:0",
            "between": "step=5 phase=between",  # the first batch of the second epoch
            "forward": "step=2 phase=forward",
            "backward": "step=3 phase=backward",
            "collective": f"step=4 phase=collective:{self.kind.collective}",
            "optimizer": "step=5 phase=optimizer",
            "commit": "step=3 phase=commit",
            "last": f"step={updates - 1} phase=optimizer",
            "two": "step=5 phase=collective:0",
        }[self.row["phase"]]
        return [f"rank={victim} {when} kill" for victim in self.victims]


def slug(row: pairwise.Row) -> str:
    return "-".join(row.values())


def arguments(configuration: pairwise.Row) -> list[str]:
    """Of train.py."""
    return [word for factor, value in configuration.items() for word in (f"--{factor}", value)]


@functools.cache
def cases() -> list[Case]:
    return [Case(number, row) for number, row in enumerate(pairwise.rows(FACTORS, left_out, ORDINARY))]


def simple(kind: str, phase: str = "", **values: str) -> pairwise.Row:
    """A row of first values, but for those that are named."""
    row = {factor: options[0] for factor, options in FACTORS.items()} | {"kind": kind} | values
    return row | {"phase": phase} if phase else {k: v for k, v in row.items() if k != "phase"}


# One row for each way to be parallel runs with the ordinary tests; together they hold every phase, and every value of
# every other factor that costs no time. The generator goes on from them.
ORDINARY = [
    simple("ddp", "two", optimizer="adamw_fused", precision="scaler", scheduler="plateau", extra="batchnorm"),
    simple("ddp_bf16_hook", "optimizer", loader="map", scheduler="chained", extra="spectral"),
    simple("ring", "commit", optimizer="adagrad", accumulation="2", loader="iterable", way="redo"),
    simple("objects", "collective", precision="autocast", scheduler="cosine", extra="dropout"),
    simple("late_groups", "last", optimizer="adam_tensor_lr", extra="ema"),
    simple("held_after", "backward", precision="bf16", scheduler="sequential"),
    simple("hsdp", "backward", optimizer="adamw_foreach", precision="mixed_policy", extra="clip", accumulation="2"),
    simple("tp", "forward", optimizer="adagrad", extra="late_group", loader="map"),
    simple("tp_sequence", "commit", precision="autocast", scheduler="plateau", extra="ema"),
    simple("tp_ddp", "between", scheduler="cosine", accumulation="2"),
    simple("megatron", "two", optimizer="adamw_foreach", extra="batchnorm", scheduler="chained", way="redo"),
    simple("pp_gpipe", "first", scheduler="plateau", extra="dropout"),
    simple("pp_1f1b", "collective", optimizer="adamw_fused", loader="iterable", accumulation="2", way="redo"),
    simple("pp_interleaved", "optimizer", extra="ema", scheduler="sequential"),
    simple("cp", "backward", precision="scaler", extra="clip"),
    simple("ep", "collective", optimizer="adamw_foreach", precision="bf16", extra="dropout"),
    simple("hsdp_tp", "forward", scheduler="cosine"),
    simple("pp_tp_dp", "setup", extra="ema"),
]

PLAIN = ORDINARY[::3]
"""are also run without tpwrap"""

__all__ = ["ORDINARY", "PLAIN", "Case", "arguments", "cases", "simple", "slug"]

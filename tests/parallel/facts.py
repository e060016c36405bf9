"""What the table combines, and what does not go together. No torch here: the table is made without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Replicas = tuple[tuple[int, ...], ...]
"""ranks by what they hold: those in one tuple hold the same"""

_FOUR: Replicas = ((0, 1, 2, 3),)
_COLUMNS: Replicas = ((0, 2), (1, 3))
_ROWS: Replicas = ((0, 1), (2, 3))


@dataclass(frozen=True)
class Kind:
    """A parallelism. module: where it is, in `kinds`."""

    module: str
    replicas: Replicas = _FOUR
    collective: int = 1
    """number of a collective in the middle of a step, which each rank has in each step"""

    @property
    def ranks(self) -> int:
        return sum(map(len, self.replicas))


KINDS: dict[str, Kind] = {
    "ddp": Kind("replicated"),
    "ddp_bf16_hook": Kind("replicated"),
    "zero_hybrid": Kind("replicated", _COLUMNS),
    "compiled_eager": Kind("replicated", collective=0),
    "compiled_aot_eager": Kind("replicated", collective=0),
    "ring": Kind("by_hand"),
    "objects": Kind("by_hand"),
    "late_groups": Kind("by_hand"),
    "held_after": Kind("by_hand"),
    "hsdp": Kind("fully_sharded", _COLUMNS),
    "tp": Kind("tensor", _COLUMNS),
    "tp_sequence": Kind("tensor", _COLUMNS),
    "tp_ddp": Kind("tensor", _COLUMNS),
    "megatron": Kind("tensor", _COLUMNS),
    "pp_gpipe": Kind("pipeline", _ROWS),
    "pp_1f1b": Kind("pipeline", _ROWS),
    "pp_interleaved": Kind("pipeline", _ROWS),
    "pp_ddp": Kind("pipeline", _ROWS),
    "cp": Kind("context"),
    "ep": Kind("expert", _COLUMNS),
    "hsdp_tp": Kind("mixes", ((0, 4), (1, 5), (2, 6), (3, 7))),
    "pp_tp_dp": Kind("mixes", ((0, 2), (1, 3), (4, 6), (5, 7))),
}

UNHEALED: dict[str, Kind] = {
    "fsdp2": Kind("fully_sharded", ((0,), (1,), (2,), (3,))),
    "zero": Kind("replicated", ((0,), (1,), (2,), (3,))),
    "fsdp1_hybrid": Kind("fully_sharded", _COLUMNS),
    "ddp_powersgd": Kind("replicated"),
    "held_before": Kind("by_hand"),
}
"""Not in the table: each rank holds what no other one does, or hides what it holds (FSDP1, a hook with a memory, the
result of an operation that is under way over an update)."""

FACTORS: dict[str, tuple[str, ...]] = {
    "kind": tuple(KINDS),
    "optimizer": ("sgd", "adamw_foreach", "adamw_fused", "adam_tensor_lr", "adagrad"),
    "precision": ("fp32", "autocast", "bf16", "scaler", "mixed_policy"),
    "accumulation": ("1", "2"),
    "loader": ("sampler", "map", "workers", "stateful", "iterable"),
    "scheduler": ("none", "cosine", "plateau", "sequential", "chained"),
    "way": ("replay", "redo"),
    "extra": ("none", "ema", "dropout", "batchnorm", "spectral", "clip", "late_group"),
    "phase": (
        "setup", "first", "between", "forward", "backward", "collective", "optimizer", "commit", "last", "two",
    ),
}  # fmt: skip

Row = Mapping[str, str]


# --- what does not go together --------------------------------------------------------------------------

_WHOLE = {
    "ddp", "ddp_bf16_hook", "compiled_eager", "compiled_aot_eager", "ring", "objects", "late_groups", "held_after",
    "cp",
}  # fmt: skip
"""kinds in which every rank has the whole gradient"""
_PIPELINES = {"pp_gpipe", "pp_1f1b", "pp_interleaved", "pp_ddp", "pp_tp_dp"}
_MIXED = {"tp", "tp_sequence", "tp_ddp", "hsdp_tp", "pp_tp_dp"}
"""kinds with parameters of both sorts, plain and DTensor"""


def a_policy_is_of_fsdp2(row: Row) -> bool:
    return row["precision"] == "mixed_policy" and row["kind"] not in ("hsdp", "hsdp_tp")


def a_policy_casts_no_statistics(row: Row) -> bool:
    """BatchNorm on the CPU takes inputs and statistics of one type only."""
    return row["precision"] == "mixed_policy" and row["extra"] == "batchnorm"


def a_scaler_needs_whole_gradients(row: Row) -> bool:
    """Otherwise ranks would differ in whether they skip an update."""
    return row["precision"] == "scaler" and row["kind"] not in _WHOLE


def a_hook_in_bf16_wants_fp32(row: Row) -> bool:
    return row["kind"] == "ddp_bf16_hook" and row["precision"] == "bf16"


def zero_wants_a_plain_rate(row: Row) -> bool:
    return row["kind"] == "zero_hybrid" and row["optimizer"] == "adam_tensor_lr"


def zero_averages_nothing_late(row: Row) -> bool:
    """Its partition of the parameters is made once."""
    return row["kind"] == "zero_hybrid" and row["extra"] == "late_group"


def several_tensors_at_once_are_of_one_sort(row: Row) -> bool:
    return row["kind"] in _MIXED and row["optimizer"] in ("adamw_foreach", "adamw_fused")


def a_norm_is_of_all_parts(row: Row) -> bool:
    """Plain partitions clipped by the norm of one part would let whole parameters drift apart."""
    return row["kind"] in ("megatron", "ep", "tp_ddp") and row["extra"] == "clip"


def the_schedule_wraps_its_own_passes(row: Row) -> bool:
    """DDP within a schedule reduces in each of its steps."""
    return row["kind"] == "pp_ddp" and row["accumulation"] == "2"


def stages_draw_differently(row: Row) -> bool:
    """Only the first stage has dropout; an order drawn from the global generator would then differ between stages."""
    return row["kind"] in _PIPELINES and row["loader"] == "map"


def a_list_of_stages_has_no_forward(row: Row) -> bool:
    """The injector could not fire there."""
    return row["kind"] == "pp_interleaved" and row["phase"] == "forward"


def a_small_budget_holds_no_set_up(row: Row) -> bool:
    """Redo is tried by allowing next to nothing to be kept for replay."""
    return row["way"] == "redo" and row["phase"] in ("setup", "first")


def objects_after_the_update_are_replayed(row: Row) -> bool:
    """And would not fit."""
    return row["way"] == "redo" and row["kind"] == "objects"


def a_schedule_knows_its_groups(row: Row) -> bool:
    return row["extra"] == "late_group" and row["scheduler"] in ("cosine", "sequential", "chained")


RULES: tuple[Callable[[Row], bool], ...] = (
    a_policy_is_of_fsdp2,
    a_policy_casts_no_statistics,
    a_scaler_needs_whole_gradients,
    a_hook_in_bf16_wants_fp32,
    zero_wants_a_plain_rate,
    zero_averages_nothing_late,
    several_tensors_at_once_are_of_one_sort,
    a_norm_is_of_all_parts,
    the_schedule_wraps_its_own_passes,
    stages_draw_differently,
    a_list_of_stages_has_no_forward,
    a_small_budget_holds_no_set_up,
    objects_after_the_update_are_replayed,
    a_schedule_knows_its_groups,
)
"""Each looks at two factors, and is True for what is left out."""


def left_out(row: Row) -> bool:
    """Whether a row, or a part of one, holds two values that do not go together."""

    class Partial(dict[str, str]):
        def __missing__(self, factor: str) -> str:
            return ""

    return any(rule(Partial(row)) for rule in RULES)

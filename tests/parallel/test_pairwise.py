"""The table holds all pairs, and little else."""

from __future__ import annotations

from tests.parallel import pairwise, table
from tests.parallel.facts import FACTORS, KINDS, RULES, left_out


def test_every_valid_pair_is_in_the_table() -> None:
    held = {pair for case in table.cases() for pair in pairwise.pairs_of(case.row, FACTORS)}
    assert set(pairwise.valid_pairs(FACTORS, left_out)) <= held


def test_no_row_is_left_out_by_a_rule() -> None:
    assert [case.row for case in table.cases() if left_out(case.row)] == []


def test_every_rule_leaves_something_out_by_two_factors() -> None:
    for rule in RULES:

        def one(row: pairwise.Row, rule=rule) -> bool:
            return rule({factor: row.get(factor, "") for factor in FACTORS})

        pairs = len(pairwise.valid_pairs(FACTORS, one))
        assert pairs < len(pairwise.valid_pairs(FACTORS, lambda row: False)), rule.__name__


def test_there_are_at_least_150_combinations_and_each_once() -> None:
    rows = [tuple(case.row.values()) for case in table.cases()]
    assert len(rows) == len(set(rows)) >= 150


def test_the_table_is_the_same_each_time() -> None:
    again = pairwise.rows(FACTORS, left_out, table.ORDINARY)
    assert again == [case.row for case in table.cases()]


def test_the_ordinary_rows_hold_every_phase_and_nearly_every_value() -> None:
    for factor, values in FACTORS.items():
        held = {row[factor] for row in table.ORDINARY}
        missing = set(values) - held
        if factor == "kind":
            assert missing == {"zero_hybrid", "compiled_eager", "compiled_aot_eager", "pp_ddp"}
        else:
            assert missing <= {"workers", "stateful"}, factor


def test_a_replica_is_left_of_all_that_is_lost() -> None:
    for case in table.cases():
        for replicas in case.kind.replicas:
            assert set(replicas) - set(case.victims), case.row


def test_the_ranks_of_a_kind_are_each_in_one_place() -> None:
    for kind in KINDS.values():
        assert sorted(rank for replicas in kind.replicas for rank in replicas) == list(range(kind.ranks))


def test_a_small_table_by_hand() -> None:
    factors = {"a": ["1", "2"], "b": ["x", "y"], "c": ["p", "q"]}
    rows = pairwise.rows(factors, lambda row: row.get("a") == "2" and row.get("c") == "q")
    assert {(row["a"], row["c"]) for row in rows} == {("1", "p"), ("1", "q"), ("2", "p")}
    assert {(row["a"], row["b"]) for row in rows} == {("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")}
    assert len(rows) <= 5

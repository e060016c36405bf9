"""Groups of tensors that the script keeps: served as they were at a commit, or refused."""

from __future__ import annotations

import pytest
import torch

from tpwrap.engine.script import slow
from tpwrap.engine.script.slow import Moved, Slow


def held(**tensors: torch.Tensor) -> Slow:
    kept = Slow()
    kept.hold("average", tensors)
    return kept


def test_what_stands_still_is_served_as_it_is() -> None:
    weight = torch.arange(1000.0)
    kept = held(weight=weight)
    for step in range(1, 5):
        kept.commit(step)
    for step in (1, 4, 9):
        found = kept.at(step, ["average"])
        assert list(found) == ["average:weight"]
        assert found["average:weight"] is weight  # no copy of what is large


def test_what_moves_is_served_as_of_its_commit() -> None:
    weight = torch.zeros(1000)
    kept = held(weight=weight)
    for step in range(1, 6):
        weight += 1
        kept.commit(step)
    weight += 100  # right after the update
    for step in (3, 4, 5):
        assert torch.equal(kept.at(step, ["average"])["average:weight"], torch.full((1000,), float(step)))
    for step in (1, 2, 6):
        with pytest.raises(Moved, match="weight was changed for the first time just now"):
            kept.at(step, ["average"])


def test_all_of_a_group_is_copied_when_one_of_it_moves() -> None:
    moving, standing = torch.zeros(10), torch.ones(10)
    kept = held(a=moving, b=standing)
    moving += 1
    kept.commit(1)
    standing += 1
    moving += 1
    found = kept.at(1, ["average"])
    assert torch.equal(found["average:a"], torch.ones(10))
    assert torch.equal(found["average:b"], torch.ones(10))


@pytest.mark.parametrize("element", [0, 3, 998, 999])
def test_a_first_change_after_the_commit_is_noticed_wherever_it_is(element: int) -> None:
    weight = torch.zeros(1000)
    kept = held(weight=weight)
    kept.commit(1)
    weight[element] = 1
    with pytest.raises(Moved):
        kept.at(1, ["average"])


def test_a_change_that_is_not_looked_at_is_never_served() -> None:
    weight = torch.zeros(100_000)
    kept = held(weight=weight)
    weight[1] = 1  # between the elements that are looked at
    kept.commit(1)
    with pytest.raises(Moved):
        kept.at(1, ["average"])


def test_small_tensors_are_looked_at_from_time_to_time() -> None:
    tensors = {f"large{i}": torch.zeros(100) for i in range(slow._LOOKED_AT)} | {"small": torch.zeros(2)}
    kept = held(**tensors)
    tensors["small"] += 1
    for step in range(1, slow._ALL):
        kept.commit(step)
        with pytest.raises(Moved):
            kept.at(step, ["average"])
    kept.commit(slow._ALL)
    assert torch.equal(kept.at(slow._ALL, ["average"])["average:small"], torch.ones(2))


def test_a_change_taken_back_before_the_commit_is_none() -> None:
    """Averaged weights that are swapped in for an evaluation, and out again."""
    weight = torch.zeros(10)
    kept = held(weight=weight)
    weight += 1
    weight -= 1
    kept.commit(1)
    assert kept.at(1, ["average"])["average:weight"] is weight


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.tensor(1.5),
        torch.zeros(4, 6).t(),
        torch.zeros(6, requires_grad=True),
        torch.zeros(6, dtype=torch.bfloat16),
        torch.zeros(6, dtype=torch.bool),
        torch.full((6,), float("nan")),
        torch.zeros(1).expand(6),
    ],
    ids=["empty", "scalar", "strided", "parameter", "bfloat16", "bool", "nan", "expanded"],
)
def test_any_tensor_can_be_held(tensor: torch.Tensor) -> None:
    kept = held(weight=tensor)
    kept.commit(1)
    found = kept.at(1, ["average"])["average:weight"]
    assert found.dtype == tensor.dtype
    assert torch.equal(found.nan_to_num(7), tensor.nan_to_num(7))


def test_the_same_tensors_change_nothing_and_others_are_another_group() -> None:
    weight = torch.zeros(10)
    kept = held(weight=weight)
    weight += 1
    kept.hold("average", {"weight": weight})  # as it was: known since it was zero
    kept.commit(1)
    weight += 1
    assert torch.equal(kept.at(1, ["average"])["average:weight"], torch.ones(10))
    other = torch.full((10,), 5.0)
    kept.hold("average", {"weight": other})
    assert kept.at(1, ["average"])["average:weight"] is other


def test_a_copy_is_not_touched_by_what_comes_later() -> None:
    weight = torch.zeros(10)
    kept = held(weight=weight)
    weight += 1
    kept.commit(1)
    copy = kept.at(1, ["average"])["average:weight"]
    weight += 1
    kept.commit(2)
    assert torch.equal(copy, torch.ones(10))


def test_groups_come_and_go() -> None:
    kept = held(weight=torch.zeros(2))
    kept.hold("teacher", {"w": torch.zeros(2), "b": torch.zeros(1)})
    kept.hold("nothing", {})
    assert kept.names() == ["average", "teacher"]
    assert set(kept.at(0, ["teacher"])) == {"teacher:w", "teacher:b"}
    kept.keep({"teacher", "unknown"})
    assert kept.names() == ["teacher"]


def test_a_newcomer_writes_into_the_tensors_themselves() -> None:
    weight = torch.zeros(2)
    kept = held(weight=weight)
    kept.mine(["average"])["average:weight"].fill_(3)
    assert torch.equal(weight, torch.full((2,), 3.0))
    kept.commit(1)
    assert torch.equal(kept.at(1, ["average"])["average:weight"], weight)

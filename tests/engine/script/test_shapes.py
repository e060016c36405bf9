"""Structures are described and made again, with zeros for tensors; what cannot be made again is refused at once."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import CausalLMOutput

from tpwrap.engine import encoding
from tpwrap.engine.script import shapes
from tpwrap.engine.script.shapes import Indescribable, Table, describe, stub


class Point(NamedTuple):
    x: Any
    y: Any


Old = namedtuple("Old", "a b")


class Encoding(dict[str, Any]):
    """A dictionary with attributes of its own, as tokenizers return them."""

    length = 3


class Batch(UserDict[str, Any]):
    pass


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: int
    inner: Any = None


class Plain:
    def __init__(self, values: Any) -> None:
        self.values = values


class Color(enum.IntEnum):
    RED = 1


class Word(str, enum.Enum):
    YES = "yes"


class Listing(list[Any]):
    pass


class Slotted:
    __slots__ = ("__dict__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


def moved(value: Any) -> Any:
    """As a newcomer gets it: the description has been bytes."""
    return stub(encoding.decode(encoding.encode(describe(value))))


def same(one: Any, other: Any) -> bool:
    """Whether `other` is `one` with zeros in its tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, enum.Enum):
        return one is other
    if isinstance(one, torch.Tensor):
        return (
            (one.dtype, one.shape, one.device, one.requires_grad, one.is_leaf)
            == (other.dtype, other.shape, other.device, other.requires_grad, other.is_leaf)
        ) and not other.any()
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        if list(one) != list(other) or not all(same(one[key], other[key]) for key in one):
            return False
        return same(getattr(one, "__dict__", None), getattr(other, "__dict__", None))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__"):
        return vars(one).keys() == vars(other).keys() and all(same(v, vars(other)[k]) for k, v in vars(one).items())
    return bool(one == other)


SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8])
TENSORS = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), SHAPES, DTYPES)
LEAVES = (
    TENSORS
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(lambda n: np.arange(n, dtype=np.int32), st.integers(0, 3))
    | st.builds(np.float16, st.floats(-4, 4))
    | st.builds(torch.Size, SHAPES)
    | st.sets(st.integers(0, 9), max_size=3)
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    entries = st.dictionaries(st.text(max_size=3), inner, max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | entries
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=2)
        | st.builds(Point, inner, inner)
        | st.builds(Old, inner, inner)
        | entries.map(OrderedDict)
        | entries.map(Encoding)
        | entries.map(Batch)
        | st.builds(Plain, inner)
        | st.builds(Sample, TENSORS, st.integers(), inner)
    )


@given(st.recursive(LEAVES, containers, max_leaves=8))
def test_a_structure_is_made_again(value: Any) -> None:
    assert same(value, moved(value))


def attributed() -> Encoding:
    made = Encoding(a=torch.ones(2))
    made.length = 5
    return made


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        [torch.ones(2, 3), ("a", b"b", 1.5, 1 + 2j, None, True)],
        np.array(3.0),
        np.str_("text"),
        torch.Size([1, 2]),
        attributed(),
        {1: "a", "b": {2: torch.ones(1)}, (3, "c"): 1, None: 2, 1.5: 3},
        CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2, 5), hidden_states=(torch.ones(1), torch.ones(2))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_made_again(value: Any) -> None:
    assert same(value, moved(value))


def test_a_models_output_answers_by_attribute_and_by_key_with_one_tensor() -> None:
    found = moved(CausalLMOutput(loss=torch.ones((), requires_grad=True) * 2, logits=torch.ones(2)))
    assert found.loss is found["loss"]
    assert found[0] is found.loss
    assert list(found.keys()) == ["loss", "logits"]
    assert found.to_tuple()[1] is found.logits


def test_what_required_grad_can_be_changed_in_place_as_there() -> None:
    there = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2]
    with torch.no_grad():
        leaf, result = moved(there)
    assert (leaf.is_leaf, result.is_leaf) == (True, False)
    result *= 3
    result.sum().backward()


def test_a_tensor_that_comes_several_times_is_one_tensor() -> None:
    a, b = torch.ones(2), torch.ones(3)
    found = moved({"one": a, "two": [b, a], "point": Point(b, a), "object": Plain([a])})
    assert found["one"] is found["two"][1] is found["point"].y is found["object"].values[0]
    assert found["two"][0] is found["point"].x
    assert found["one"] is not found["two"][0]


def test_a_packed_sequence_is_made_again() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    found = moved(packed)
    assert type(found) is type(packed)
    assert found.data.shape == packed.data.shape


def local() -> Any:
    class Local:
        pass

    return Local()


def circle() -> Any:
    made = Plain(None)
    made.values = [made]
    return made


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2).to_sparse(),
        [1, {"a": object()}],
        frozenset({1}),
        range(3),
        iter([1]),
        local(),
        torch.nn.Linear(1, 1),
        int,
        threading.Lock(),
        {"a": torch.ones(1).to_sparse()},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_made_again_is_refused(value: Any) -> None:
    with pytest.raises(Indescribable):
        describe(value)


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    "value",
    [
        lambda: 1,
        len,
        threading,
        ValueError("x"),
        Listing([1]),
        circle(),
        Slotted(1),
        Plain(generator()),
        np.array([object()], dtype=object),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        Color.RED,
        Word.YES,
    ],
    ids=lambda value: type(value).__name__,
)
def test_refused_or_the_same(value: Any) -> None:
    """The live rank must know whether a newcomer will be able to make it; never something else in its place."""
    try:
        Table().number(value)
    except Indescribable:
        return
    found = moved(value)
    assert same(value, found)
    if isinstance(value, Slotted):
        assert found.value == value.value
    if isinstance(value, np.ma.MaskedArray):
        assert found.mask.tolist() == value.mask.tolist()


@pytest.mark.parametrize(
    "description",
    [
        ("object", "nowhere", "Thing", None, []),
        ("object", __name__, "Missing", None, []),
        ("named", __name__, "Point.Missing", []),
        ("named", __name__, "describe", []),
    ],
)
def test_a_type_that_is_not_there_is_named(description: Any) -> None:
    with pytest.raises(Indescribable, match=r"which is not there"):
        stub(description)


# --- numbers --------------------------------------------------------------------------------------------


def test_the_same_structure_has_the_same_number() -> None:
    table = Table()
    batch = [torch.ones(2, 3), torch.ones(2)]
    assert table.number(batch) == (0, describe(batch))
    assert table.number([torch.zeros(2, 3), torch.zeros(2)]) == 0
    assert table.number([torch.ones(1, 3), torch.ones(1)])[0] == 1
    assert table.number(batch) == 0


@given(st.lists(st.recursive(TENSORS | st.text(max_size=3), containers, max_leaves=4), max_size=12))
def test_numbers_are_looked_up_in_a_newcomer_who_goes_on_numbering(values: list[Any]) -> None:
    live, newcomer, third = Table(), Table(), Table()
    half = len(values) // 2
    for value in values[:half]:
        number = encoding.decode(encoding.encode(live.number(value)))
        assert encoding.encode(newcomer.look_up(number)) == encoding.encode(describe(value))
        third.look_up(number)
    for value in values[half:]:  # the newcomer is live now; a third one follows both
        number = newcomer.number(value)
        assert encoding.encode(third.look_up(number)) == encoding.encode(describe(value))


def test_a_long_description_has_no_number() -> None:
    table = Table()
    text = "x" * shapes._LONGEST
    assert table.number(text) == (-1, ("plain", text))
    assert table.number(text) == (-1, ("plain", text))
    assert table.number(1)[0] == 0


def test_a_value_that_cannot_be_encoded_is_indescribable() -> None:
    with pytest.raises(Indescribable, match="array of Python objects"):
        Table().number([np.array([object()], dtype=object)])

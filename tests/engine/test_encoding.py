from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpwrap.engine import encoding

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
    max_leaves=20,
)


@given(plain)
def test_plain_data_comes_back_equal_and_with_its_types(value: object) -> None:
    back = encoding.decode(encoding.encode(value))
    assert back == value
    assert repr(back) == repr(value)  # tells tuples from lists, and -0.0 from 0.0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0, 3),
        torch.randn(5).bfloat16(),
        torch.tensor([True, False]),
        torch.arange(4, dtype=torch.int16),
        torch.tensor([1 + 2j]),
    ],
)
def test_tensors_come_back_bit_for_bit(tensor: torch.Tensor) -> None:
    back = encoding.decode(encoding.encode([tensor]))[0]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert encoding.tensor_bytes(back) == encoding.tensor_bytes(tensor)


def test_arrays_sets_and_odd_numbers() -> None:
    value = {"a": np.arange(6, dtype=np.uint32).reshape(2, 3), "s": {3, 1}, "big": 1 << 200}
    value |= {"c": 1j, "n": np.float32(2)}
    back = encoding.decode(encoding.encode(value))
    assert np.array_equal(back["a"], value["a"])
    assert back["a"].dtype == np.uint32
    assert (back["s"], back["big"], back["c"], back["n"]) == ({3, 1}, 1 << 200, 1j, np.float32(2))
    assert math.isnan(encoding.decode(encoding.encode(float("nan"))))


@pytest.mark.parametrize("value", [object(), {"a": [lambda: 0]}, {(1, 2): 3}, np.array([object()])])
def test_what_cannot_be_moved_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(TypeError, match="value"):
        encoding.encode(value)

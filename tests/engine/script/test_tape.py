"""The tape gives back what was recorded, in order, in chunks and segments, and says so when it is asked otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpwrap.engine.script.tape import KINDS, SEGMENT, Diverged, End, Tape

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary()
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=6,
)
ENTRIES = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 5000), VALUES)
ASIDES = st.tuples(st.just("draws"), st.just(-1), VALUES)


def sealed(tape: Tape, segments: list[bytes]) -> End:
    end, closed = tape.seal()
    if closed is not None:
        segments.append(closed)
    return end


def recorded(*entries: tuple[str, int, Any]) -> tuple[list[bytes], End]:
    tape, segments = Tape(), list[bytes]()
    for entry in entries:
        tape.record(*entry)
    return segments, sealed(tape, segments)


def playing(*entries: tuple[str, int, Any]) -> Tape:
    tape = Tape()
    tape.load(*recorded(*entries))
    return tape


@given(st.lists(st.lists(ENTRIES | ASIDES, max_size=6), max_size=6))
def test_what_was_recorded_is_answered_in_order(chunks: list[list[tuple[str, int, Any]]]) -> None:
    tape, segments, end = Tape(), list[bytes](), End(0, b"", 0)
    for chunk in chunks:
        for kind, line, value in chunk:
            if line < 0:
                tape.aside(kind, value)
            else:
                tape.record(kind, line, value)
        end = sealed(tape, segments)
    everything = [entry for chunk in chunks for entry in chunk]
    entries = [entry for entry in everything if entry[1] >= 0]
    assert end.entries == len(entries) == tape.count

    other = Tape()
    other.load(segments, end)
    assert other.asides == [(kind, value) for kind, line, value in everything if line < 0]
    for left, (kind, line, value) in zip(range(len(entries), 0, -1), entries, strict=True):
        assert other.left == left
        assert other.play(kind, line) == value
    assert other.left == 0


def test_arrays_and_tensors_come_back_with_their_bits() -> None:
    array, tensor = np.array([[1.5, np.nan], [-0.0, np.inf]], dtype=np.float32), torch.tensor([1.0, -0.0]).bfloat16()
    tape = playing(("v", 1, array), ("v", 2, tensor), ("v", 3, 2**200), ("v", 4, np.float16(0.1)))
    found = tape.play("v", 1)
    assert (found.dtype, found.tobytes()) == (array.dtype, array.tobytes())
    assert torch.equal(tape.play("v", 2).view(torch.int16), tensor.view(torch.int16))
    assert tape.play("v", 3) == 2**200
    last = tape.play("v", 4)
    assert (type(last), last) == (np.float16, np.float16(0.1))


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [
        ("t", 7, "line 7 asks for the time, but the failed rank asked for a tensor's value at line 7"),
        ("v", 8, "line 8 asks for a tensor's value, but the failed rank asked for a tensor's value at line 7"),
    ],
)
def test_who_asks_for_something_else_has_diverged(kind: str, line: int, words: str) -> None:
    tape = playing(("v", 7, 1.0))
    with pytest.raises(Diverged) as raised:
        tape.play(kind, line)
    assert str(raised.value) == words
    assert tape.play("v", 7) == 1.0  # nothing was used up


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_who_asks_past_the_end_has_diverged(kind: str) -> None:
    tape = playing(("v", 7, 1.0))
    tape.play("v", 7)
    with pytest.raises(Diverged, match=f"line 9 asks for {KINDS[kind]} after the end of what was recorded"):
        tape.play(kind, 9)


@pytest.mark.parametrize("claimed", [0, 1, 3])
def test_another_number_of_entries_than_was_recorded_is_noticed(claimed: int) -> None:
    segments, end = recorded(("v", 1, 1), ("v", 2, 2))
    with pytest.raises(Diverged, match=f"the tape has 2 entries where {claimed} were recorded"):
        Tape().load(segments, end._replace(entries=claimed))


def test_a_missing_segment_is_noticed() -> None:
    tape, segments = Tape(), list[bytes]()
    tape.record("v", 1, b"x" * SEGMENT)
    sealed(tape, segments)
    tape.record("v", 2, 2)
    end = sealed(tape, segments)
    with pytest.raises(Diverged, match="the tape has 1 entries where 2 were recorded"):
        Tape().load([], end)


def test_a_segment_is_closed_when_it_is_full_and_never_changes() -> None:
    tape, segments = Tape(), list[bytes]()
    for step in range(40):
        tape.record("v", step, b"x" * 1000)
        before = len(segments)
        end = sealed(tape, segments)
        assert end.segments == len(segments)
        assert len(end.open) < SEGMENT
        if len(segments) > before:
            assert end.open == b""
            assert SEGMENT <= len(segments[-1]) < SEGMENT + 1100
        other = Tape()
        other.load(list(segments), end)
        assert [other.play("v", n) for n in range(step + 1)] == [b"x" * 1000] * (step + 1)
    assert len(segments) == 4


def test_nothing_pending_changes_nothing() -> None:
    tape = Tape()
    tape.record("v", 1, 1)
    end, closed = tape.seal()
    assert closed is None
    assert tape.seal() == (end, None)


def test_a_value_that_cannot_be_moved_is_refused_and_named() -> None:
    tape = Tape()
    with pytest.raises(TypeError, match="object cannot be encoded"):
        tape.record("o", 1, [object()])
    assert tape.seal()[0].entries == 0  # and what comes later is not spoilt by it


def test_a_newcomer_goes_on_recording_where_the_record_ended() -> None:
    tape, segments = Tape(), list[bytes]()
    tape.record("v", 1, b"x" * SEGMENT)
    sealed(tape, segments)
    tape.record("v", 2, 2)
    end = sealed(tape, segments)

    second = Tape()
    second.load(segments, end)
    second.play("v", 1)
    second.play("v", 2)
    second.answered("v", 3, 3)
    second.record("v", 4, 4)
    end = sealed(second, segments)
    assert (end.segments, end.entries) == (1, 4)

    third = Tape()
    third.load(segments, end)
    assert [third.play("v", line) for line in (1, 2, 3, 4)] == [b"x" * SEGMENT, 2, 3, 4]


def test_a_longer_record_goes_on_where_the_newcomer_is() -> None:
    tape, segments = Tape(), list[bytes]()
    for line in (1, 2):
        tape.record("v", line, line)
    first = sealed(tape, segments)
    for line in (3, 4, 5):
        tape.record("v", line, line)
    second = sealed(tape, segments)

    newcomer = Tape()
    newcomer.load(segments, first)
    newcomer.play("v", 1)
    newcomer.play("v", 2)
    newcomer.answered("v", 3, 3)  # without the record, which ended there
    newcomer.load(segments, second)
    assert newcomer.left == 2
    assert [newcomer.play("v", line) for line in (4, 5)] == [4, 5]
    assert newcomer.seal()[0] == second  # 3 stands once in it


def test_what_was_answered_beyond_a_record_stays_pending() -> None:
    segments, end = recorded(("v", 1, 1), ("v", 2, 2))
    newcomer = Tape()
    newcomer.load(*recorded(("v", 1, 1)))
    newcomer.play("v", 1)
    for line in (2, 3, 4):
        newcomer.answered("v", line, line)
    newcomer.load(segments, end)
    end = sealed(newcomer, segments)
    other = Tape()
    other.load(segments, end)
    assert [other.play("v", line) for line in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_asides_do_not_count_for_what_stays_pending() -> None:
    segments, end = recorded(("v", 1, 1))
    newcomer = Tape()
    newcomer.load(segments, end)
    newcomer.play("v", 1)
    newcomer.answered("v", 2, 2)
    newcomer.aside("draws", "state")
    newcomer.answered("v", 3, 3)
    newcomer.load(segments, end)
    end = sealed(newcomer, segments)
    other = Tape()
    other.load(segments, end)
    assert [other.play("v", line) for line in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, 2], lambda value: value.pop()),
        ([{"loss": 1}], lambda value: value[0].update(loss=2)),
        ({"a": 1}, dict.clear),
        (torch.ones(2).numpy(), lambda value: value.fill(0.0)),
        (([1], 2), lambda value: value[0].append(3)),
        (torch.ones(2), torch.Tensor.zero_),
    ],
    ids=["list", "inside", "dict", "array", "tuple", "tensor"],
)
def test_what_the_script_does_with_a_value_afterwards_is_not_on_the_tape(value: Any, change: Any) -> None:
    expected = playing(("v", 1, value)).play("v", 1)
    tape, segments = Tape(), list[bytes]()
    tape.record("v", 1, value)
    change(value)
    other = Tape()
    other.load(segments, sealed(tape, segments))
    found = other.play("v", 1)
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)

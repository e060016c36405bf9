"""The boundary records what comes out of regions and answers it to a newcomer, who does not run them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpwrap.engine.script.boundary import Boundary, Mode, where
from tpwrap.engine.script.tape import LARGEST, Tape


class GaveUp(RuntimeError):
    pass


def fail(reason: str) -> NoReturn:
    raise GaveUp(reason)


class Recorder(Boundary):
    """A boundary with the segments of its tape that are closed."""

    def __init__(self, segments: Sequence[bytes] = ()) -> None:
        super().__init__(Tape(), fail)
        self.segments = [*segments]


def live() -> Recorder:
    return Recorder()


def newcomer(of: Recorder) -> Recorder:
    """One on its way, with the tape of `of`."""
    end, closed = of.tape.seal()
    of.segments += [closed] if closed is not None else []
    made = Recorder(of.segments)
    made.tape.load(of.segments, end)
    made.load_draws()
    made.mode = Mode.FORWARD
    return made


def never() -> Any:
    raise AssertionError("a newcomer must not compute this")


# --- values ---------------------------------------------------------------------------------------------


def test_a_value_is_computed_and_recorded_live_and_answered_in_a_newcomer() -> None:
    first = live()
    assert first.cross("v", lambda: 3, 7) == 3
    second = newcomer(first)
    assert second.cross("v", never, 7) == 3
    with pytest.raises(GaveUp, match="line 7 asks for a tensor's value after the end of what was recorded"):
        second.cross("v", never, 7)


def test_a_newcomer_that_asks_for_something_else_gives_up() -> None:
    first = live()
    first.cross("v", lambda: 3, 7)
    with pytest.raises(GaveUp, match="line 8 asks for the time, but the failed rank asked for a tensor's value"):
        newcomer(first).cross("t", never, 8)


def crossing(one: Boundary, compute: Callable[[], Any]) -> Any:
    return one.cross("v", compute)


def test_the_line_is_that_of_who_called_the_function_that_crosses() -> None:
    first = live()
    for value in (1, 2):
        crossing(first, lambda value=value: value)  # type: ignore[misc]
    crossing(first, lambda: 3)
    lines = [line for _, line, _ in first.tape.pending]
    assert lines[0] == lines[1] == lines[2] - 1


@pytest.mark.parametrize(
    ("mode", "inside", "outside"),
    [
        (Mode.LIVE, 0, True),
        (Mode.FORWARD, 0, True),
        (Mode.WINDOW, 0, True),
        (Mode.OFF, 0, False),
        (Mode.LIVE, 1, False),
        (Mode.FORWARD, 2, False),
    ],
)
def test_the_script_itself_is_outside_of_regions_and_observed(mode: Mode, inside: int, outside: bool) -> None:
    one = live()
    one.mode = mode
    for _ in range(inside):
        one.enter()
    assert one.outside is outside


def test_another_thread_is_not_the_script() -> None:
    one, seen = live(), list[bool]()
    thread = threading.Thread(target=lambda: seen.append(one.outside))
    thread.start()
    thread.join()
    assert seen == [False]
    assert one.outside


def test_what_a_value_is_computed_with_is_not_the_scripts() -> None:
    one = live()
    assert one.cross("v", lambda: one.outside, 1) is False
    assert one.outside


def test_a_computation_that_fails_leaves_the_boundary_as_it_was() -> None:
    one = live()
    with pytest.raises(ZeroDivisionError):
        one.cross("v", lambda: 1 / 0, 1)
    assert one.outside


def files(one: Boundary, sizes: dict[str, int]) -> list[int]:
    """A script that asks for sizes of files, some of which are not there."""
    found = []
    for name in ("a", "b", "c"):
        try:
            found.append(one.cross("f", lambda name=name: sizes[name], 1))  # type: ignore[misc]
        except KeyError:
            continue
    return found


def test_a_question_that_failed_fails_in_a_newcomer_too() -> None:
    first = live()
    assert files(first, {"a": 1, "c": 3}) == [1, 3]
    second = newcomer(first)
    assert files(second, {"a": 9, "b": 9, "c": 9}) == [1, 3]
    assert second.tape.left == 0


def test_quiet_and_aside_are_not_the_scripts_and_run_in_a_newcomer() -> None:
    for mode in (Mode.LIVE, Mode.FORWARD):
        one = live()
        one.mode = mode

        def function(a: int, b: int, one: Boundary = one) -> tuple[int, bool]:
            """Adds."""
            return a + b, one.outside

        quiet = one.quiet(function)
        assert quiet(1, b=2) == (3, False)
        assert (quiet.__name__, quiet.__doc__) == ("function", "Adds.")
        with one.aside():
            assert not one.outside
            with one.aside():
                assert not one.outside
            assert not one.outside
        assert one.outside
        with pytest.raises(TypeError):
            quiet()
        assert one.outside
        assert one.regions == 0


def test_an_aside_of_another_thread_does_not_hide_the_script() -> None:
    one, inside, go_on = live(), threading.Event(), threading.Event()

    def other() -> None:
        with one.aside():
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    assert one.outside
    go_on.set()
    thread.join()
    assert one.outside


@pytest.mark.parametrize(("size", "kept"), [(LARGEST - 1000, True), (LARGEST + 1, False)])
def test_a_value_that_is_too_large_is_noted_and_left_out(size: int, kept: bool) -> None:
    first = live()
    value = np.zeros(size, dtype=np.uint8)
    assert first.cross("v", lambda: value, 7) is value
    assert [*first.too_large.values()] == ([] if kept else [size])
    assert isinstance(first.tape.pending[0][2], np.ndarray) is kept


def test_a_newcomer_cannot_pass_where_a_value_was_too_large() -> None:
    first = live()
    first.cross("v", lambda: np.ones(LARGEST + 1, dtype=np.uint8), 7)
    with pytest.raises(GaveUp, match=f"line 7 takes {LARGEST + 1} bytes out of a tensor"):
        newcomer(first).cross("v", never, 7)


ERRORS = [
    ValueError("x"),
    ZeroDivisionError("division by zero"),
    FileNotFoundError(2, "No such file or directory", "a.txt"),
    OSError("plain"),
    KeyError("name"),
    IndexError(),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid start byte"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_is_an_answer(error: Exception) -> None:
    def compute() -> Any:
        raise error

    first = live()
    with pytest.raises(type(error)):
        first.cross("f", compute, 7)
    second = newcomer(first)
    with pytest.raises(type(error)) as raised:
        second.cross("f", never, 7)
    assert str(raised.value) == str(error)
    assert getattr(raised.value, "errno", None) == getattr(error, "errno", None)
    assert second.outside
    assert second.tape.left == 0


def test_an_exception_of_a_librarys_is_one_of_pythons() -> None:
    class Special(ValueError):
        pass

    def compute() -> Any:
        raise Special("x")

    first = live()
    with pytest.raises(Special):
        first.cross("f", compute, 7)
    with pytest.raises(ValueError, match=r"^x$"):
        newcomer(first).cross("f", never, 7)


def test_an_exception_in_the_window_is_an_answer() -> None:
    second = newcomer(live())
    second.mode = Mode.WINDOW
    with pytest.raises(ZeroDivisionError):
        second.cross("f", lambda: 1 / 0, 7)
    second.cross("f", lambda: 3, 8)
    third = newcomer(second)
    with pytest.raises(ZeroDivisionError):
        third.cross("f", never, 7)
    assert third.cross("f", never, 8) == 3


def test_an_exception_that_other_ranks_have_seen_is_raised_in_the_window() -> None:
    first = live()
    with pytest.raises(ZeroDivisionError):
        first.cross("v", lambda: 1 / 0, 7)
    seen = first.tape.answers()[0][2]
    second = newcomer(live())
    second.mode = Mode.WINDOW
    second.window = lambda kind, line, compute, subjects: seen
    with pytest.raises(ZeroDivisionError):
        second.cross("v", never, 7)


class Result:
    """An object of the script's own, as all_gather_object may bring it."""


@pytest.mark.parametrize(
    "value",
    [[Result()], [{("a", 1): 2}], [threading.Lock()], [torch.ones(2, requires_grad=True) * 2]],
    ids=["object", "keys", "lock", "graph"],
)
def test_what_the_tape_cannot_hold_does_not_end_the_training(value: Any) -> None:
    """A newcomer cannot pass it, and says so; the rank itself goes on."""
    first = live()
    assert first.cross("o", lambda: value, 7) is value
    second = newcomer(first)  # this is what a publication does
    try:
        found = second.cross("o", never, 7)
    except GaveUp as error:
        assert "line 7" in str(error)  # noqa: PT017
    else:
        assert type(found[0]) is type(value[0])


def test_in_the_window_the_tape_is_played_to_its_end_and_then_the_window_answers() -> None:
    first = live()
    first.cross("v", lambda: 1, 1)
    second = newcomer(first)
    second.mode = Mode.WINDOW
    asked: list[Any] = []

    def window(kind: str, line: int, compute: Callable[[], Any], subjects: tuple[Any, ...]) -> Any:
        asked.append((kind, line, subjects))
        return compute() + 1

    second.window = window
    assert second.cross("v", never, 1) == 1
    assert second.cross("t", lambda: 2, 5, ("subject",)) == 3
    assert asked == [("t", 5, ("subject",))]
    assert second.tape.pending == [("t", 5, 3)]
    assert newcomer(second).tape.left == 2


def test_the_observer_is_told_of_what_comes_out_live() -> None:
    one, seen = live(), list[Any]()
    one.observer = lambda kind, where, subjects: seen.append((kind, subjects))
    one.cross("v", lambda: 1, 7, ("x",))
    one.enter()
    one.leave()
    assert seen == [("v", ("x",))]


def test_where_names_the_line_of_the_script() -> None:
    import sys

    frame = sys._getframe()
    assert where(frame) == f"test_boundary.py:{frame.f_lineno}"
    assert where(None) == ""


# --- regions --------------------------------------------------------------------------------------------


def test_the_training_begins_with_its_first_region_once() -> None:
    one, seen = live(), list[Any]()
    one.begin = lambda: seen.append(("begin", one.outside))
    one.enter()
    one.leave()
    one.next_region = lambda: seen.append(("next", one.outside))
    one.enter()
    one.leave()
    one.enter()
    one.leave()
    assert seen == [("begin", False), ("next", False)]
    assert one.regions == 3


def test_begin_may_ask_to_be_called_again() -> None:
    one, seen = live(), list[int]()

    def begin() -> None:
        seen.append(1)
        one.begin = begin if len(seen) < 3 else None

    one.begin = begin
    for _ in range(5):
        one.enter()
        one.leave()
    assert len(seen) == 3


# --- draws ----------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    "normal": lambda: float(np.random.standard_normal()),
}
EVENTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(sorted(DRAWS)), max_size=3),  # by the script
        st.lists(st.sampled_from(sorted(DRAWS)), max_size=3),  # in the region that follows
    ),
    max_size=8,
)


def train(one: Boundary, steps: list[tuple[list[str], list[str]]]) -> list[Any]:
    """A script that draws between regions that draw: what it has drawn itself."""
    drawn = []
    for own, inside in steps:
        drawn += [DRAWS[name]() for name in own]
        one.enter()
        if one.mode is not Mode.FORWARD:
            for name in inside:
                DRAWS[name]()
        one.leave()
    return drawn


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_the_scripts_own_draws_are_the_same_in_a_newcomer(steps: list[tuple[list[str], list[str]]]) -> None:
    steps = [*steps, ([], [])]  # draws after the last region are followed by none, and not published yet
    seed(1)
    first = live()
    expected = train(first, steps)
    second = newcomer(first)
    seed(1)
    second.settle_draws()
    assert train(second, steps) == expected
    assert second.regions == first.regions


@settings(max_examples=100, deadline=None)
@given(EVENTS, EVENTS)
def test_a_newcomer_that_went_live_is_followed_by_another(
    before: list[tuple[list[str], list[str]]], after: list[tuple[list[str], list[str]]]
) -> None:
    before, after = [*before, ([], [])], [*after, ([], [])]
    seed(1)
    first = live()
    expected = train(first, before)
    state = random.getstate(), np.random.get_state()
    second = newcomer(first)
    seed(1)
    second.settle_draws()
    assert train(second, before) == expected
    random.setstate(state[0])  # what the sidecar brings
    np.random.set_state(state[1])
    second.mode = Mode.LIVE
    second.settle_draws()
    expected += train(second, after)

    third = newcomer(second)
    seed(1)
    third.settle_draws()
    assert train(third, [*before, *after]) == expected


def test_as_long_as_the_script_draws_nothing_nothing_is_recorded() -> None:
    one = live()
    train(one, [([], ["random", "normal"])] * 5)
    assert one.tape.pending == []


def test_draws_are_recorded_only_where_a_region_has_drawn_since() -> None:
    one = live()
    train(one, [(["random"], []), (["random"], ["numpy"]), (["random"], []), (["random"], []), ([], [])])
    assert [(kind, value[0]) for kind, _, value in one.tape.pending] == [("draws", 2)]


def test_draws_in_a_region_within_a_region_are_not_the_scripts() -> None:
    def script(one: Boundary) -> list[float]:
        drawn = []
        for _ in range(3):
            one.enter()
            if one.mode is not Mode.FORWARD:
                random.random()
            one.enter()
            one.leave()
            one.leave()
            drawn.append(random.random())
            one.enter()
            one.leave()
        return drawn

    seed(1)
    first = live()
    expected = script(first)
    second = newcomer(first)
    seed(1)
    second.settle_draws()
    assert script(second) == expected
    assert second.regions == first.regions == 6

"""Which names may still be read: by hand-written cases, and by disturbing everything else in generated functions.

Needs neither torch nor the engine, so it runs on every interpreter.
"""

from __future__ import annotations

import copy
import sys
import textwrap
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpwrap.engine.script.liveness import live_names

NAMES = "abcd"


def live_at_probe(source: str, *args: Any, wanted: int = 0) -> set[str]:
    """Runs `def f(...)` of `source`; what is live in f at its probe number `wanted`."""
    seen: list[frozenset[str]] = []

    def probe(*_: Any, **__: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_code.co_name != "f":
            assert frame.f_back is not None
            frame = frame.f_back
        seen.append(live_names(frame))
        return 1

    space: dict[str, Any] = {"probe": probe}
    exec(textwrap.dedent(source), space)
    result = space["f"](*args)
    if hasattr(result, "__next__"):
        list(result)
    return set(seen[wanted])


@pytest.mark.parametrize(
    ("source", "live"),
    [
        ("def f(a=1, b=2):\n  probe()\n  return a", {"a"}),
        ("def f(a=1, b=2):\n  probe()\n  b = a\n  return b", {"a"}),
        ("def f(a=1):\n  b = probe()\n  return b", set()),
        ("def f(a=1):\n  probe()\n  a += 1\n  return a", {"a"}),
        ("def f(a=1, b=1):\n  a = a + probe()\n  return a", {"a"}),  # on the value stack
        ("def f(a=1, b=1):\n  a += probe()\n  return a", {"a"}),
        ("def f(a=1, b=1):\n  return [a, probe()]", {"a"}),
        ("def f(a=1, b=1):\n  return [(a,), probe()]", {"a"}),
        ("def f(a=1, b=1):\n  return probe(a)", set()),  # an argument is the callee's
        ("def f(a=1, b=1):\n  return [b, probe(a)]", {"b"}),
        ("def f(a=(1,), b=1):\n  for c in a:\n    b = probe()\n", {"a"}),  # the iterator
        ("def f(a=(1,), b=1):\n  for c in a:\n    probe()\n    b = c", {"a", "c"}),
        ("def f(a=(1,), b=1):\n  for c in enumerate(a):\n    pass\n  probe()", set()),
        ("def f(a=1, b=1):\n  for _ in range(2):\n    probe()\n    a = b", {"b"}),
        ("def f(a=1, b=1):\n  for _ in range(2):\n    probe()\n    b = a\n    a = 2", {"a"}),
        ("def f(a=1, b=1):\n  for _ in range(2):\n    print(b, end='')\n    probe()\n    b = a", {"a"}),
        ("def f(a=0, b=1):\n  while a < 2:\n    a += 1\n    probe()", {"a"}),
        ("def f(a=1, b=1):\n  if a:\n    probe()\n  else:\n    print(b)", set()),
        ("def f(a=1, b=1):\n  probe()\n  del b\n  b = 2\n  return b", set()),
        ("def f(a=1, b=1):\n  try:\n    b = probe()\n  except ValueError:\n    return b", {"b"}),
        ("def f(a=1, b=1):\n  try:\n    probe()\n  finally:\n    b = a\n  return b", {"a"}),
        ("def f(a=1, b=1):\n  try:\n    1 / 0\n  except ZeroDivisionError as e:\n    probe()\n    return b", {"b"}),
        ("def f(a=1):\n  def g(): return a\n  probe()", {"a"}),  # a closure may read it at any time
        ("def f(a=1):\n  def g():\n    nonlocal a\n    a = 2\n  probe()", {"a"}),
        ("def f(a=1, b=2):\n  probe()\n  return locals()", {"a", "b"}),
        ("def f(a=1, b=2):\n  probe()\n  exec('c = a')", {"a", "b"}),
        ("def f(a=1, b=2):\n  probe()\n  yield a", {"a"}),
        ("def f(a=1, b=2):\n  for i in range(2):\n    yield i\n    probe()\n    print(end=str(a)[:0])", {"a"}),
        ("def f(a=1, b=2, c=3):\n  probe()\n  return a, b", {"a", "b"}),
        ("def f(a=1, b=2, c=3):\n  probe()\n  c, b = a, 1\n  return b, c", {"a"}),
        ("def f(a=1, b=2):\n  return f'{a} {probe()}'", {"a"}),
        ("def f(a=1, b=2):\n  return a if probe() else b", {"a", "b"}),
        ("def f(a=1, b=2):\n  return a and probe() and b", {"b"}),
        ("def f(a=[1], b=2):\n  a[0] = probe()", {"a"}),
        ("def f(a=[1], b=2):\n  a[0] += probe()", {"a"}),
        ("def f(a=1, b=2, *c, **d):\n  return dict(x=a, y=probe())", {"a"}),
        ("def f(a=1, b=2, *c, **d):\n  return probe(*c, **d), a", {"a"}),
        ("def f(a=1, b=2, *c, **d):\n  return {**d, 'x': a, 'y': probe()}", {"a", "d"}),
    ],
)
def test_live_names(source: str, live: set[str]) -> None:
    assert live_at_probe(source) == live


def test_zero_argument_super_reads_the_first_variable() -> None:
    seen: list[frozenset[str]] = []

    class Base:
        def run(self) -> None: ...

    class Derived(Base):
        def run(self, other: int = 1) -> None:
            seen.append(live_names(sys._getframe()))
            super().run()

    Derived().run()
    assert "self" in seen[0]
    assert "other" not in seen[0]


def test_inside_a_comprehension_the_list_it_goes_through_lives() -> None:
    assert "a" in live_at_probe("def f(a=(1, 2), b=2):\n  return [probe() for x in [a] for y in a]")
    assert "b" not in live_at_probe("def f(a=(1, 2), b=2):\n  return [probe() for x in a]")


def test_a_suspended_generator() -> None:
    space: dict[str, Any] = {}
    exec("def g(a, b):\n  c = 3\n  yield 1\n  yield a\n  yield c\n", space)
    generator = space["g"](1, 2)
    assert live_names(generator.gi_frame) == {"a"}
    next(generator)
    assert live_names(generator.gi_frame) == {"a", "c"}
    next(generator)
    assert live_names(generator.gi_frame) == {"c"}


def module_live(source: str) -> set[str]:
    seen: list[frozenset[str]] = []
    space: dict[str, Any] = {"probe": lambda: seen.append(live_names(sys._getframe(1)))}
    exec(compile(textwrap.dedent(source), "train.py", "exec"), space)
    return set(seen[0])


@pytest.mark.parametrize(
    ("source", "live", "dead"),
    [
        ("a = 1\nb = 2\nprobe()\nprint(end=str(a)[:0])", {"a"}, {"b"}),
        ("a = b = 1\nfor i in range(2):\n  probe()\n  a = b", {"b"}, {"a"}),
        ("a = b = 1\ndef f():\n  return lambda: a\nprobe()", {"a"}, {"b"}),
        ("a = b = 1\nclass C:\n  def f(self): return a\nprobe()", {"a"}, {"b"}),
        ("a = 1\nprobe()\na = 2\nprint(end=str(a)[:0])", set(), {"a"}),
        ("a = b = 1\ndef f(): return globals()\nprobe()", {"a", "b"}, set()),
        ("a = b = 1\nprobe()\ndel a\nx = [a for a in range(3)]", set(), {"a", "b"}),
        ("a = b = 1\nx = [a for a in [probe()]]\nprint(end=str(a)[:0])", {"a"}, {"b"}),
        ("a = b = 1\na = [a, probe()]", {"a"}, {"b"}),
    ],
)
def test_live_globals(source: str, live: set[str], dead: set[str]) -> None:
    found = module_live(source)
    assert live <= found
    assert not dead & found


def test_a_class_body_keeps_all_its_names() -> None:
    seen: list[frozenset[str]] = []
    space: dict[str, Any] = {"probe": lambda: seen.append(live_names(sys._getframe(1)))}
    exec("class C:\n  a = 1\n  probe()", space)
    assert "a" in seen[0]


# Generated functions: whatever is not live may be disturbed, and nobody notices.


class Oops(Exception):
    pass


class Box:
    """A value that can be spoilt in place, as a tensor can."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __add__(self, other: Box) -> Box:
        return Box((self.value * 3 + other.value) % 1009)

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class World:
    """What a generated function may call. `spoil` is the number of the probe at which dead names are disturbed."""

    def __init__(self, choices: list[bool], spoil: int | None) -> None:
        self.choices = choices
        self.spoil = spoil
        self.probes = self.asked = 0
        self.seen: list[int] = []

    def probe(self) -> Box:
        if self.probes == self.spoil:
            disturb(sys._getframe(1))
        self.probes += 1
        return Box(self.probes)

    def flag(self) -> bool:
        self.asked += 1
        if self.asked > 200:
            raise TimeoutError
        return self.choices[self.asked % len(self.choices)]

    def maybe(self) -> None:
        if self.flag():
            raise Oops

    def see(self, box: Box) -> None:
        self.seen.append(box.value)


def boxes(value: Any) -> list[Box]:
    if isinstance(value, (type(iter([])), type(iter(())))):
        value = list(copy.copy(value))  # what a comprehension's own frame (before Python 3.12) goes through
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Box)]


def disturb(frame: FrameType | None) -> None:
    """Spoils what the dead names hold, of the generated function's frame and of those inside it."""
    kept: set[int] = set()
    dead: list[Box] = []
    while frame is not None and frame.f_code.co_filename == "<generated>":
        live = live_names(frame)
        for name, value in dict(frame.f_locals).items():
            if name in live:
                kept.update(map(id, boxes(value)))
            else:
                dead += boxes(value)
        frame = frame.f_back
    for box in dead:
        if id(box) not in kept:
            box.value = -1


name = st.sampled_from(NAMES)
expression = st.one_of(
    st.builds("{0}".format, name),
    st.just("probe()"),
    st.just("Box(7)"),
    st.builds("({0} + {1})".format, name, name),
    st.builds("({0} + probe())".format, name),
    st.builds("(probe() + {0})".format, name),
    st.builds("[{0}, {1}, probe()][1]".format, name, name),
    st.builds("({0} if flag() else {1} + probe())".format, name, name),
    st.builds("({0} + {1} + (probe() if flag() else {2}))".format, name, name, name),
    st.builds("[{0} + probe() for e in ({1}, {2})][0]".format, name, name, name),
    st.builds("(lambda: {0} + probe())()".format, name),
)
simple = st.one_of(
    st.builds("{0} = {1}".format, name, expression),
    st.builds("{0} = {1}".format, name, expression),
    st.builds("{0}, {1} = {2}, {3}".format, name, name, expression, expression),
    st.builds("{0} += probe()".format, name),
    st.builds("see({0})".format, name),
    st.builds("del {0}".format, name),
    st.just("probe()"),
    st.just("maybe()"),
    st.builds("if flag(): return {0}".format, name),
    st.builds("xs = [{0}, {1}]; probe(); see(xs[0])".format, name, name),
)
in_loop = st.one_of(st.just("if flag(): break"), st.just("if flag(): continue"), simple)


def indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "  ")


def compound(block: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(block, min_size=1, max_size=3).map(indented)
    loop_body = st.lists(st.one_of(block, in_loop), min_size=1, max_size=4).map(indented)
    return st.one_of(
        st.builds("if flag():\n{0}\nelse:\n{1}".format, body, body),
        st.builds("for i in range(3):\n{0}".format, loop_body),
        st.builds("for {0} in [{1}, {2}]:\n{3}\nelse:\n{4}".format, name, name, name, loop_body, body),
        st.builds("for i, {0} in enumerate(({1}, {2})):\n{3}".format, name, name, name, loop_body),
        st.builds("while flag():\n{0}".format, loop_body),
        st.builds("try:\n{0}\nexcept Oops as e:\n{1}".format, body, body),
        st.builds("try:\n{0}\nfinally:\n{1}".format, body, body),
        st.builds("try:\n{0}\nexcept Oops:\n{1}\nelse:\n{2}\nfinally:\n{3}".format, body, body, body, body),
        st.builds("with {0} as {1}:\n{2}".format, name, name, body),
    )


statement = st.recursive(simple, compound, max_leaves=8)


def outcome(function: Callable[..., Any], world: World) -> tuple[Any, list[int]]:
    space = function.__globals__
    space.update(probe=world.probe, flag=world.flag, maybe=world.maybe, see=world.see, Box=Box, Oops=Oops)
    try:
        result = function(*(Box(value) for value in range(2, 6)))
        return None if result is None else result.value, world.seen
    except (Oops, UnboundLocalError, NameError, TimeoutError) as error:
        return type(error).__name__, world.seen


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(statement, min_size=2, max_size=6), st.lists(st.booleans(), min_size=3, max_size=9))
def test_what_is_not_live_can_be_spoilt(statements: list[str], choices: list[bool]) -> None:
    source = f"def f({', '.join(NAMES)}):\n{indented(statements)}\n  return a"
    space: dict[str, Any] = {}
    exec(compile(source, "<generated>", "exec"), space)
    undisturbed = World(choices, None)
    expected = outcome(space["f"], undisturbed)
    for probe in range(min(undisturbed.probes, 20)):
        assert outcome(space["f"], World(choices, probe)) == expected, f"spoilt at probe {probe}:\n{source}"

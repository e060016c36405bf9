"""Did a rehearsed failure change what was computed? Compares the traces of two runs (`tpwrap.engine.script.trace`).

A trace directory holds `rank<r>.jsonl`, a line for each update. The first difference is named by what comes first in a
step: the batch, then the random state and the variables that go with it, then what is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tpwrap.report.compare import ResultError, records

Steps: TypeAlias = dict[int, dict[str, Any]]
"""step -> record, of one rank"""


class Difference(NamedTuple):
    """The first thing that is not equal. a, b: what the two runs have, "" where a run has nothing.

    kind: batch | random | values | loss | scalars | state | missing | twice
    """

    step: int
    rank: int
    kind: str
    what: str
    a: str = ""
    b: str = ""

    def __str__(self) -> str:
        values = f": {self.a or 'nothing'} and {self.b or 'nothing'}" if self.a or self.b else ""
        return f"step {self.step}, rank {self.rank}: {self.what}{values}"


class Comparison(NamedTuple):
    """difference: None where all is equal. steps: how many updates were compared. left_out: what says nothing,
    because it is not the same before the failure either (the time, a generator that nobody seeds and nobody uses)."""

    difference: Difference | None
    steps: int
    left_out: list[str]


def read(directory: Path) -> dict[int, Steps]:
    """rank -> its trace. Raises ResultError where a rank has written something twice, and differently."""
    paths = {int(path.stem.removeprefix("rank")): path for path in directory.glob("rank*.jsonl")}
    return {rank: records(paths[rank].read_text(encoding="utf-8"), f"rank {rank}") for rank in sorted(paths)}


def compare(a: dict[int, Steps], b: dict[int, Steps], world_size: int, failure: int) -> Comparison:
    """a: the undisturbed run. b: the run in which a rank failed after `failure` updates."""
    last = max((max(steps, default=0) for steps in a.values()), default=0)
    left_out = _left_out(a, b, failure)
    for step in range(1, last + 1):
        pairs = [(rank, a.get(rank, {}).get(step), b.get(rank, {}).get(step)) for rank in range(world_size)]
        for rank, ours, theirs in pairs:
            if ours is None or theirs is None:
                who = "undisturbed run" if ours is None else "run with a failure"
                missing = Difference(step, rank, "missing", f"the {who} did not get there")
                return Comparison(missing, last, sorted(left_out))
        for kind, differences in _KINDS.items():
            for rank, ours, theirs in pairs:
                assert ours is not None
                assert theirs is not None
                for what, one, other in differences(ours[kind], theirs[kind]):
                    words = _WORDS[kind].format(what).rstrip()
                    if words not in left_out:
                        found = Difference(step, rank, kind, words, one, other)
                        return Comparison(found, last, sorted(left_out))
    return Comparison(None, last, sorted(left_out))


def advice(difference: Difference, failure: int, session: bool = True) -> str:
    """What to do about it. session: the script has the two lines."""
    if difference.step <= failure:
        return (
            "the two runs differ before the failure, so the script does not compute the same twice. Seed every random "
            "generator it uses (random, numpy, torch), then rehearse again"
        )
    return (_ADVICE if session else _ADVICE_AS_IS).get(difference.kind, _ADVICE[difference.kind])


def has_session(a: dict[int, Steps]) -> bool:
    """Whether the script that left the trace has the two lines."""
    return any(bool(record.get("session")) for steps in a.values() for record in steps.values())


def _left_out(a: dict[int, Steps], b: dict[int, Steps], failure: int) -> set[str]:
    return {
        _WORDS[kind].format(name)
        for rank, steps in a.items()
        for step, record in steps.items()
        if step <= failure and step in b.get(rank, {})
        for kind in ("random", "values")
        for name, _, _ in _by_name(record[kind], b[rank][step][kind])
    }


def _in_order(a: list[str], b: list[str]) -> Iterator[tuple[str, str, str]]:
    for index in range(max(len(a), len(b))):
        one, other = (some[index] if index < len(some) else "" for some in (a, b))
        if one != other:
            yield f"{index + 1}" if max(len(a), len(b)) > 1 else "", one, other


def _by_name(a: dict[str, str], b: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in {**a, **b}:
        if a.get(name, "") != b.get(name, ""):
            yield name, a.get(name, ""), b.get(name, "")


_KINDS: dict[str, Callable[[Any, Any], Iterator[tuple[str, str, str]]]] = {
    "batch": _in_order,
    "random": _by_name,
    "values": _by_name,
    "loss": _in_order,
    "scalars": _by_name,
    "state": _by_name,
}
_WORDS = {
    "batch": "batch {}",
    "random": "random state of {}",
    "values": "variable `{}`",
    "loss": "loss {}",
    "scalars": "setting `{}` of optimizer or schedule",
    "state": "tensor {}",
}
_ADVICE = {
    "batch": (
        "the newcomer took other samples. Loop with `tp.batches(loader)` and `tp.epochs(n)`; if the data set, sampler "
        "or loader counts by itself, register that: tp.register(name, get, set)"
    ),
    "random": (
        "random numbers were drawn where a newcomer does not draw them, or not as often. Draw none between backward() "
        "and the end of optimizer.step(), and let nothing else than tp.updates decide how many are drawn"
    ),
    "values": "register it: tp.register(name, get, set), and change it before backward() or after optimizer.step()",
    "loss": (
        "batch and random state are equal, so the loss depends on something that was not restored: a global, a "
        "counter, an object's attribute. Register it: tp.register(name, get, set), or compute it from tp.updates"
    ),
    "scalars": "give the scheduler to tpwrap.session(scheduler=…); register what else changes it: tp.register",
    "state": (
        "the losses are equal, so the update depends on something that was not restored. Whatever acts on gradients "
        "or weights (an average, a clipping threshold, a hook) must be registered: tp.register(name, get, set)"
    ),
    "missing": "look into the output of that run",
}
_ADVICE_AS_IS = {
    "batch": "the newcomer took other samples. Use the two lines (tpwrap.session, tp.batches), or report it",
    "random": (
        "random numbers were drawn where a newcomer does not draw them. Draw none between backward() and the end of "
        "optimizer.step(), or use the two lines (tpwrap.session, tp.batches)"
    ),
    **dict.fromkeys(
        ("values", "loss", "scalars", "state"),
        "it depends on something that a newcomer does not compute as the failed rank did: a gradient read after "
        "optimizer.step(), a large tensor that is read after backward(), the time, another process, a thread, an "
        "extension in C. Use the two lines (tpwrap.session, tp.batches) and register it: tp.register",
    ),
}

__all__ = ["Comparison", "Difference", "ResultError", "Steps", "advice", "compare", "has_session", "read"]

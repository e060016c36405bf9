"""Injected failures as data: `rank=1 step=20 phase=backward kill`.

One fault is one line: where (`rank=N` or `node=N`), when (`step=S phase=P`), what (the action). A fault
fires during the step with that number, counting optimizer updates applied so far: `step=0` (or `step=first`)
is before the first update. Each fault fires once in the life of a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["kill", "exception", "stop", "exit", "drop"]
Phase = Literal["setup", "between", "forward", "backward", "collective", "optimizer", "commit", "recovery"]
RecoveryStage = Literal["release", "rebuild", "restore", "verify", "resume"]

ACTIONS: tuple[Action, ...] = ("kill", "exception", "stop", "exit", "drop")
NODE_ACTIONS: tuple[Action, ...] = ("kill", "stop")
PHASES: tuple[Phase, ...] = (
    "setup", "between", "forward", "backward", "collective", "optimizer", "commit", "recovery",
)  # fmt: skip
STAGES: tuple[RecoveryStage, ...] = ("release", "rebuild", "restore", "verify", "resume")

_PHASE_HELP = (
    "setup, between, forward, backward, collective:N, optimizer, commit, "
    + "recovery:STAGE with STAGE one of " + ", ".join(STAGES)
)  # fmt: skip
_EXAMPLE = "for example 'rank=1 step=20 phase=backward kill'"


@dataclass(frozen=True)
class Fault:
    """One failure to inject."""

    target: Literal["rank", "node"]
    index: int
    step: int | None
    """None: whatever the step (only for phases setup and recovery)"""
    phase: Phase
    n: int | None
    """phase collective: which collective of the step, from 0"""
    stage: RecoveryStage | None
    """phase recovery: in which stage"""
    action: Action

    def __str__(self) -> str:
        words = [f"{self.target}={self.index}"]
        if self.step is not None:
            words.append(f"step={self.step}")
        detail = f":{self.n}" if self.n is not None else f":{self.stage}" if self.stage else ""
        words.append(f"phase={self.phase}{detail}")
        words.append(self.action)
        return " ".join(words)


def parse(text: str) -> Fault:
    """Read one fault. ValueError names the field, what was given and what is allowed, in one line."""
    fields: dict[str, str] = {}
    action: str | None = None
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals:
            name, value = "action", word
        if name not in ("rank", "node", "step", "phase", "action"):
            raise _error(text, name, "is not a field", "rank, node, step, phase and one action")
        if name in fields:
            raise _error(text, name, "is given twice", "it once")
        fields[name] = value
    action = fields.get("action")
    if action is None:
        raise _error(text, "action", "is missing", ", ".join(ACTIONS))
    target, index = _target(text, fields)
    phase, n, stage = _phase(text, fields)
    step = _step(text, fields, phase)
    if action not in ACTIONS:
        raise _error(text, "action", f"{action!r} is unknown", ", ".join(ACTIONS))
    if target == "node" and action not in NODE_ACTIONS:
        raise _error(text, "action", f"{action!r} cannot happen to a node", ", ".join(NODE_ACTIONS))
    if action == "drop" and phase != "collective":
        raise _error(text, "action", f"'drop' needs a collective, not phase={phase}", "phase=collective:N")
    return Fault(target, index, step, phase, n, stage, action)


def parse_file(text: str) -> tuple[Fault, ...]:
    """Read one fault a line; blank lines and everything after `#` are skipped."""
    faults: list[Fault] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        try:
            faults.append(parse(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return tuple(faults)


def _error(text: str, field: str, what: str, allowed: str) -> ValueError:
    given = " ".join(text.split()) or "(nothing)"
    return ValueError(f"{given!r}: {field} {what}; allowed: {allowed} ({_EXAMPLE})")


def _number(text: str, field: str, value: str, allowed: str = "0, 1, 2, …") -> int:
    if not (value.isascii() and value.isdecimal()):
        raise _error(text, field, f"{value!r} is not a number", allowed)
    return int(value)


def _target(text: str, fields: dict[str, str]) -> tuple[Literal["rank", "node"], int]:
    if ("rank" in fields) == ("node" in fields):
        what = "and node are both given" if "rank" in fields else "or node is missing"
        raise _error(text, "rank", what, "one of rank=N, node=N")
    if "rank" in fields:
        return "rank", _number(text, "rank", fields["rank"])
    return "node", _number(text, "node", fields["node"])


def _phase(text: str, fields: dict[str, str]) -> tuple[Phase, int | None, RecoveryStage | None]:
    given = fields.get("phase")
    if given is None:
        raise _error(text, "phase", "is missing", _PHASE_HELP)
    name, colon, detail = given.partition(":")
    for phase in PHASES:
        if phase == name:
            break
    else:
        raise _error(text, "phase", f"{given!r} is unknown", _PHASE_HELP)
    if phase == "collective":
        return phase, _number(text, "phase", detail, "collective:N with N = 0, 1, 2, …"), None
    if phase == "recovery":
        for stage in STAGES:
            if stage == detail:
                return phase, None, stage
        raise _error(text, "phase", f"{given!r} names no stage", "recovery:" + ", recovery:".join(STAGES))
    if colon:
        raise _error(text, "phase", f"{given!r} takes nothing after the colon", _PHASE_HELP)
    return phase, None, None


def _step(text: str, fields: dict[str, str], phase: Phase) -> int | None:
    given = fields.get("step")
    if given is None:
        if phase in ("setup", "recovery"):
            return None
        raise _error(text, "step", f"is missing (phase={phase} needs one)", "first, 0, 1, 2, …")
    step = 0 if given == "first" else _number(text, "step", given, "first, 0, 1, 2, …")
    if phase == "setup":
        if step:
            raise _error(text, "step", f"{step} comes after set-up", "no step with phase=setup")
        return None
    return step

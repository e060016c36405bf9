"""Did two runs compute the same? Compares what the examples write, bit by bit.

A result directory holds `rank<r>.jsonl`, one JSON object a committed step with at least the field `step`,
and what was true at the end: `final.json`, or `final<r>.json` for each rank. A rank that was replaced may
repeat the last line of its predecessor (identically), after a line that was cut in the middle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
_FINAL_FILE = re.compile(r"final(\d*)\.json")
_OF_THE_PROCESS = {"pid", "objects"}
"""fields that tell about the process, not about what it computed"""

Record = dict[str, Any]


class ResultError(Exception):
    """A result directory is not what it should be: incomplete, or it contradicts itself."""


class Results:
    """What one run has left: rank -> step -> record, and name of a final file -> record."""

    def __init__(self, steps: dict[int, dict[int, Record]], final: dict[str, Record]) -> None:
        self.steps = steps
        self.final = final

    def last_step(self) -> int:
        """The number of committed steps."""
        return max((max(records, default=0) for records in self.steps.values()), default=0)


def read(directory: Path) -> Results:
    """Read and check one result directory."""
    steps: dict[int, dict[int, Record]] = {}
    final: dict[str, Record] = {}
    try:
        for path in sorted(directory.iterdir()):
            if found := _RANK_FILE.fullmatch(path.name):
                steps[int(found[1])] = records(path.read_text(encoding="utf-8"), str(path))
            elif found := _FINAL_FILE.fullmatch(path.name):
                final[path.name] = _final(path)
    except OSError as e:
        raise ResultError(f"{e.filename}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ResultError(f"{directory} holds a file that is no text, so it was not written by an example") from None
    if not steps:
        raise ResultError(f"{directory} holds no rank<r>.jsonl")
    if sorted(steps) != list(range(len(steps))):
        raise ResultError(f"{directory} has results of ranks {sorted(steps)}: one is missing")
    if not final:
        raise ResultError(f"{directory} holds no final.json: the run has not ended well")
    if "final.json" not in final and len(final) != len(steps):
        raise ResultError(f"{directory} has {len(steps)} ranks, but only {', '.join(final)}")
    results = Results(steps, final)
    last = results.last_step()
    for rank, of_rank in steps.items():
        missing = next((s for s in range(1, last + 1) if s not in of_rank), None)
        if missing is not None:
            raise ResultError(f"{directory}: rank {rank} has no line for step {missing} (of {last})")
    return results


def records(text: str, where: str) -> dict[int, Record]:
    """The lines of one rank by step. Repeated lines must be equal; of a line that a kill has cut, nothing
    counts, and the next line may follow on it directly."""
    found: dict[int, Record] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        record = _parse(line) or _parse(line[line.rfind('{"') :])
        if record is None:
            if number == len(lines) or not line.strip():
                continue
            raise ResultError(f"{where}:{number}: not a record: {line[:80]!r}")
        step = int(record["step"])
        earlier = found.setdefault(step, record)
        field = _difference(earlier, record)
        if field is not None:
            raise ResultError(
                f"{where}:{number}: step {step} was written twice, with different {field}: "
                f"{earlier.get(field)!r} and {record.get(field)!r}"
            )
    return found


def first_difference(a: Results, b: Results) -> str | None:
    """The first difference by step, then rank, then field, in words; None where there is none."""
    if len(a.steps) != len(b.steps):
        return f"number of ranks: {len(a.steps)} and {len(b.steps)}"
    for step in range(1, min(a.last_step(), b.last_step()) + 1):
        for rank in sorted(a.steps):
            field = _difference(a.steps[rank][step], b.steps[rank][step])
            if field is not None:
                values = [r.steps[rank][step].get(field) for r in (a, b)]
                return f"rank {rank}, step {step}, {field}: {values[0]!r} and {values[1]!r}"
    if a.last_step() != b.last_step():
        return f"number of steps: {a.last_step()} and {b.last_step()}"
    for name in sorted({*a.final, *b.final}):
        if (name in a.final) != (name in b.final):
            return f"{name}: only one of them has it"
        field = _difference(a.final[name], b.final[name])
        if field is not None:
            return f"{name}, {field}: {a.final[name].get(field)!r} and {b.final[name].get(field)!r}"
    return None


def compare(a: Path, b: Path) -> str | None:
    """The first difference between two result directories, or None. ResultError if one is incomplete."""
    return first_difference(read(a), read(b))


def _final(path: Path) -> Record:
    record = _parse(path.read_text(encoding="utf-8"), needs_step=False)
    if record is None:
        raise ResultError(f"{path}: not a JSON object")
    return {field: value for field, value in record.items() if field not in _OF_THE_PROCESS}


def _parse(line: str, needs_step: bool = True) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or (needs_step and not isinstance(record.get("step"), int)):
        return None
    return record


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    return next((field for field in sorted({*a, *b}) if a.get(field, ...) != b.get(field, ...)), None)

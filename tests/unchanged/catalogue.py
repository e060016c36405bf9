"""The scripts, and where a failure may hit each of them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DIRECTORY = Path(__file__).resolve().parent / "scripts"
RANKS = 3
OUTPUT = "out"
"""where a script writes, below the directory that it runs in"""

Point = Literal["first", "middle", "boundary", "evaluation", "last", "end"]
POINTS: tuple[Point, ...] = ("first", "middle", "boundary", "evaluation", "last", "end")
Unit = Literal["rank", "node"]
Kill = tuple[Point, int, Unit]
"""where, which rank, and whether its node goes with it"""


@dataclass(frozen=True)
class Script:
    name: str
    updates: int
    """calls of optimizer.step() that change something, of all optimizers together"""
    period: int
    """updates from one pass, or evaluation, to the next"""
    evaluation: str = "between"
    """the phase of the step after a pass that lies in the evaluation, or where else something special happens"""
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """modules that may be missing"""
    noise: str = ""
    """lines that say what time it is, and the like"""

    def told(self, text: str) -> list[str]:
        """The lines that are compared."""
        return [line for line in text.splitlines() if not (self.noise and re.search(self.noise, line))]

    def fault(self, kill: Kill) -> str:
        point, victim, unit = kill
        step, phase = {
            "first": (0, "backward"),
            "middle": (min(self.period + self.period // 2, self.updates - 2), "backward"),
            "boundary": (self.period - 1, "commit"),
            "evaluation": (self.period, self.evaluation),
            "last": (self.updates - 1, "optimizer"),
            "end": (self.updates - 1, "commit"),
        }[point]
        return f"{unit}={victim} step={step} phase={phase} kill"


def of(name: str, updates: int, period: int, evaluation: str = "between", *arguments: str, **more: object) -> Script:
    """`python name.py`, with --output-dir unless the arguments say where to write."""
    words = arguments or ("--output-dir", OUTPUT)
    return Script(name, updates, period, evaluation, (sys.executable, str(DIRECTORY / f"{name}.py"), *words), **more)  # type: ignore[arg-type]


SCRIPTS = (
    of("functional_ddp", 24, 8),
    of("trainer_class", 24, 6, "between", OUTPUT),
    of("epochs_meters", 42, 7, "collective:0"),
    of("steps_cycle", 20, 7, "forward", "--results-folder", OUTPUT),
    of("nanogpt", 21, 8, "forward", f"--out_dir={OUTPUT}"),
    of("module_level", 21, 7, "between", "unused", environment={"OUTPUT_DIR": OUTPUT}),
)


def chosen(number: int) -> Kill:
    """The kill of the script with this number, so that every pair of point, victim and unit is met several times."""
    return POINTS[number % 6], (number + number // 6) % RANKS, ("rank", "node")[(number // 2 + number // 6) % 2]


def others(number: int) -> list[Kill]:
    """What is left of the points, for the long tests."""
    kills: list[Kill] = [(point, (number + i) % RANKS, ("rank", "node")[(number + i // 3) % 2]) for i, point in enumerate(POINTS)]
    return [kill for kill in kills if kill[0] != chosen(number)[0]]

"""The scripts, and where a failure may hit each of them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DIRECTORY = Path(__file__).resolve().parent / "scripts"
REFUSED = DIRECTORY.parent / "refused"
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
    only: str = ""
    """where most is noise: what is compared"""

    def told(self, text: str) -> list[str]:
        """The lines that are compared."""
        if self.only:
            return re.findall(self.only, text)
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
    of("epochs_meters", 21, 7, "collective:0"),
    # It converts a loss with its graph, of which PyTorch warns once in a process: a newcomer warns again.
    of("steps_cycle", 20, 7, "forward", "--results-folder", OUTPUT, noise="UserWarning|tensor.detach|^  "),
    of("nanogpt", 21, 8, "forward", f"--out_dir={OUTPUT}"),
    of("module_level", 21, 7, "between", "unused", environment={"OUTPUT_DIR": OUTPUT}),
    of("accumulation", 24, 8),
    of("amp_bfloat16", 16, 8),
    of("amp_scaler", 20, 9, "backward", OUTPUT),  # the step that will be skipped
    of("gan", 28, 14),
    of("two_optimizers", 24, 7, "optimizer"),  # between the two
    of("zipped_loaders", 21, 7),
    of("eval_plateau", 24, 4, "collective:1"),
    of("ema_by_hand", 21, 7, "forward"),
    of("swa", 24, 6),
    of("hydra_like/train", 21, 7, "between", f"output_dir={OUTPUT}"),
    of("config_dataclass", 21, 7),
    Script(
        "speech",
        21,
        7,
        command=(sys.executable, "-m", "speech.train", "--output-dir", OUTPUT),
        environment={"PYTHONPATH": str(DIRECTORY / "project")},
    ),
    Script("shell", 28, 14, command=(str(DIRECTORY / "run_training.sh"), OUTPUT)),
    of("manual_allreduce", 24, 6, "collective:2"),  # among the gradients
    of("mixup", 24, 8),
    of("curriculum", 24, 8, "forward", OUTPUT),
    of("iterable", 20, 6),
    of("workers", 21, 7, "forward"),
    of("padded_text", 21, 7),
    of("classic_tutorial", 24, 8),
    of("tensor_running_loss", 24, 8, "collective:0"),
    of("grad_norm", 20, 7, "optimizer"),
    of("schedulers", 21, 7),
    of("log_files", 21, 7),
    of("distillation", 21, 7),  # the teacher is done
    of("contrastive", 21, 7, "collective:0"),  # embeddings are gathered
    of("unfreeze", 21, 7, "forward"),  # the first one of the new wrapper
    of("progress_bar", 21, 7, needs=("tqdm",), only=r"epoch \d of rank \d ended.*"),
    of("run_name", 21, 7, "collective:0"),
    of("resume", 21, 7, "collective:0"),
    of("closures", 20, 6),
    of("train_state", 21, 7),
    of("islice_loop", 18, 6),
    of("multi_losses", 21, 7, "forward"),
)


def chosen(number: int) -> Kill:
    """The kill of the script with this number, so that every pair of point, victim and unit is met several times."""
    return POINTS[number % 6], (number + number // 6) % RANKS, ("rank", "node")[number // 2 % 2]


def others(number: int) -> list[Kill]:
    """What is left of the points, for the long tests."""
    return [
        (point, (number + i) % RANKS, ("rank", "node")[(number + i // 3) % 2])
        for i, point in enumerate(POINTS)
        if point != chosen(number)[0]
    ]

"""What both forms of the demo print: two runs beside each other, the pause, and whether they are equal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tpwrap.core import events
from tpwrap.report import compare

console = Console(highlight=False)


def failovers(run_dir: Path) -> list[events.FailoverFinished]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [e for _, e in map(events.from_line, lines) if isinstance(e, events.FailoverFinished)]


def loss_curve(undisturbed: Path, healed: Path, rank: int) -> Table:
    """Losses of `rank`, which was lost, beside each other."""
    table = Table("step", "undisturbed", "node lost", "", title=f"Loss of rank {rank} (hexadecimal floats: every bit)")
    left, right = (compare.read(directory).steps[rank] for directory in (undisturbed, healed))
    steps = max(left)
    for step in sorted({1, *range(steps // 8, steps + 1, max(1, steps // 8)), steps // 2, steps // 2 + 1, steps}):
        x, y = left[step]["loss"], right[step]["loss"]
        table.add_row(str(step), f"{float.fromhex(x):.6f}  {x}", f"{float.fromhex(y):.6f}  {y}", "=" if x == y else "≠")
    return table


def pause(event: events.FailoverFinished, node: str) -> Table:
    console.print(f"\nThe pause: {node} was lost in step {event.step}; {event.reason}")
    table = Table("stage", "ms")
    for stage, seconds in event.stages.items():
        table.add_row(stage, f"{1000 * seconds:.0f}")
    table.add_row("[bold]all[/]", f"[bold]{1000 * event.seconds:.0f}[/]")
    return table


def verdict(undisturbed: Path, healed: Path, survivors: list[int], steps: int, times: str) -> int:
    """Compare everything; 0 if all of it is equal."""
    objects = [json.loads((healed / f"final{rank}.json").read_text())["objects"] for rank in survivors]
    difference = compare.compare(undisturbed, healed)
    if difference is not None or objects != ["ok"] * len(survivors):
        console.print(f"[red bold]NOT EQUAL[/]: {difference or 'a survivor lost its objects'}")
        return 1
    lines = 4 * steps
    console.print(
        f"[green bold]EQUAL[/]: {lines} losses, the samples of {lines} steps, and the final weights and optimizer "
        f"state of 4 ranks agree bit for bit;\n{len(survivors)} survivors kept process and objects. ({times})"
    )
    return 0

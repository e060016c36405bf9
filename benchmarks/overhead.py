"""What does protection cost while nothing fails? Step time and cost per collective call, beside torchrun, paired.

    python benchmarks/overhead.py [--pairs 5]

The same script under `tpwrap` and under `torchrun`, in turn, 4 ranks on this machine: DDP at two model sizes, and HSDP,
where every update waits for a vote (a script as it is protects no sharded model).
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.pause import spread
from benchmarks.running import RANKS, step_times, under_torchrun, under_tpwrap

SIZES = {
    "4.7 MB of gradients": ["--width", "384", "--batch-size", "256", "--steps", "150"],
    "19 MB of gradients": ["--width", "768", "--batch-size", "128", "--steps", "120"],
    "4.7 MB, HSDP": ["--width", "384", "--batch-size", "256", "--steps", "120", "--hsdp"],
}
CALLS = {"all-reduce of 4 bytes": "1", "all-reduce of 1 MB": str(1 << 18)}
_WARM_UP = 20


def step_ms(out: Path) -> float:
    """Median step time over all ranks."""
    gaps: list[float] = []
    for rank in range(RANKS):
        when = [t for _, t in step_times(out, rank)][_WARM_UP:]
        gaps += [b - a for a, b in itertools.pairwise(when)]
    return 1000 * statistics.median(gaps)


def call_us(out: Path) -> float:
    return statistics.median(float((out / f"call{rank}.txt").read_text()) for rank in range(RANKS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="paired runs of each (default 5; about 2 min each)")
    pairs = parser.parse_args().pairs
    console = Console()
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in (*SIZES, *CALLS)}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for pair in track(range(pairs), "paired runs", console=console):
            for name in rows:
                script = "mlp.py" if name in SIZES else "allreduce.py"
                arguments = SIZES.get(name) or ["--elements", CALLS[name]]
                if CALLS.get(name, "1") != "1":
                    arguments += ["--calls", "500"]
                measure = step_ms if name in SIZES else call_us
                here = root / f"{pair}-{name.replace(' ', '-')}"
                under_tpwrap(script, here / "tpwrap", arguments, [])
                if "--hsdp" not in arguments:
                    under_tpwrap(script, here / "as-is", [*arguments, "--as-is"], [])
                under_torchrun(script, here / "torchrun", arguments)
                hows = ("tpwrap", "as-is", "torchrun")
                rows[name].append(tuple(measure(here / how) if (here / how).exists() else math.nan for how in hows))
    title = f"median (min–max) of {pairs} paired runs; ratios pair by pair"
    table = Table("", "two lines", "as it is", "torchrun", "two lines / torchrun", "as it is / torchrun", title=title)
    for name, values in rows.items():
        unit = "ms/step" if name in SIZES else "µs/call"
        columns = [spread([row[i] for row in values]) for i in range(3)]
        ratios = [spread([row[i] / row[2] for row in values]) for i in range(2)]
        table.add_row(f"{name}, {unit}", *columns, *ratios)
    console.print(table)


if __name__ == "__main__":
    main()

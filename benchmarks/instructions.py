"""How many instructions does protection cost while nothing fails? Per step and per all-reduce, beside torchrun.

    python -m benchmarks.instructions [--steps 100] [--keep DIRECTORY]

Counts repeat to a percent on any machine, however busy it is, where times do not. One rank alone, under callgrind (a
part of valgrind, which must be installed): with others, it would be counted how often they let it wait. What the kernel
does, and the sidecar's server in the supervisor, is not in it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.counted import CALLS
from benchmarks.running import HERE, environment

_TOTAL = re.compile(r"^totals: (\d+)$", re.MULTILINE)


def count(launcher: list[str], what: str, steps: int, directory: Path) -> int:
    """Instructions in `steps` steps. Raises subprocess.CalledProcessError when the run fails."""
    directory.mkdir(parents=True)
    callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={directory}/callgrind.%p"]
    command = [*launcher, *callgrind, sys.executable, str(HERE / "counted.py"), what, str(steps)]
    with (directory / "output.txt").open("wb") as log:
        subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment(), check=True,
            timeout=900,
        )  # fmt: skip
    return max(int(total) for file in directory.glob("callgrind.*") for total in _TOTAL.findall(file.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps that are counted (default 100; about 3 min)")
    parser.add_argument("--keep", type=Path, help="keep the profiles there, for callgrind_annotate")
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed. On Debian or Ubuntu: sudo apt-get install valgrind")
    console = Console()
    counts: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = (args.keep or Path(scratch)).resolve()
        launchers = {
            "tpwrap": [sys.executable, "-m", "tpwrap", "--nodes", "1", "--failure-timeout", "300", "--quiet"],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"],
        }
        launchers["tpwrap"] += ["--run-dir", str(root / "run")]
        launchers["torchrun"] += ["--no-python"]
        for name, launcher in launchers.items():
            for what in ("steps", "calls"):
                with console.status(f"counting {what} under {name}"):
                    shutil.rmtree(root / "run", ignore_errors=True)
                    counts[name, what] = count(launcher, what, args.steps, root / f"{name}-{what}") / args.steps
            counts[name, "calls"] = (counts[name, "calls"] - counts[name, "steps"]) / CALLS
    table = Table("instructions", "tpwrap", "torchrun", "difference")
    for what, label in (("steps", "a step of a small DDP model"), ("calls", "an all-reduce of 4 bytes")):
        ours, theirs = counts["tpwrap", what], counts["torchrun", what]
        table.add_row(label, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours - theirs:,.0f}")
    console.print(table)


if __name__ == "__main__":
    main()

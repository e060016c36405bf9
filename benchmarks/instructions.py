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


def count(launcher: list[str], what: str, steps: int, api: str, directory: Path) -> int:
    """Instructions in `steps` steps. Raises subprocess.CalledProcessError when the run fails."""
    directory.mkdir(parents=True)
    callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={directory}/callgrind.%p"]
    command = [*launcher, *callgrind, sys.executable, str(HERE / "counted.py"), what, str(steps), api]
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
    tpwrap, torchrun = "tpwrap, two lines", "torchrun"
    as_is = "tpwrap, as it is"
    with tempfile.TemporaryDirectory() as scratch:
        root = (args.keep or Path(scratch)).resolve()
        ours = [sys.executable, "-m", "tpwrap", "--nodes", "1", "--failure-timeout", "300", "--quiet"]
        ours += ["--run-dir", str(root / "run")]
        theirs = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]
        for name, launcher, api in ((tpwrap, ours, "two-lines"), (as_is, ours, "as-is"), (torchrun, theirs, "as-is")):
            for what in ("steps", "calls"):
                with console.status(f"counting {what} under {name}"):
                    shutil.rmtree(root / "run", ignore_errors=True)
                    directory = root / f"{name.replace(', ', '-').replace(' ', '-')}-{what}"
                    counts[name, what] = count(launcher, what, args.steps, api, directory) / args.steps
            counts[name, "calls"] = (counts[name, "calls"] - counts[name, "steps"]) / CALLS
    table = Table("instructions", torchrun, f"{tpwrap}: more", f"{as_is}: more")
    for what, label in (("steps", "a step of a small DDP model"), ("calls", "an all-reduce of 4 bytes")):
        base = counts[torchrun, what]
        more = (f"{counts[name, what] - base:,.0f}" for name in (tpwrap, as_is))
        table.add_row(label, f"{base:,.0f}", *more)
    console.print(table)


if __name__ == "__main__":
    main()

from __future__ import annotations

import argparse
import sys

from examples import demo
from examples.demo import local, shown


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=demo.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local", action="store_true", help="emulated nodes, without Slurm")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    arguments = parser.parse_args()
    if not arguments.local:
        from examples.demo import slurm
        from tests.cluster import BedUnavailable

        try:
            return slurm.main(arguments.steps or 160)
        except BedUnavailable as reason:
            shown.console.print(f"[yellow]without Slurm, on emulated nodes[/], because {reason}")
    return local.main(arguments.steps or 60)


if __name__ == "__main__":
    sys.exit(main())

"""Compiling for a Slurm version: plugins must be built against its own headers."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import install, project
from tests.cluster.bed import PATH, CommandFailed


def compile_in(version: str, argv: Sequence[str | Path], cwd: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run a command (gcc, make) as root in the root file system of `version`, where `cwd` and the repository show.

    What it writes below those two stays; anything else it writes is gone afterwards.
    """
    base = install.root(version)
    mountpoint = install.cache() / "mnt"
    mountpoint.mkdir(parents=True, exist_ok=True)
    command = [str(word) for word in argv]
    place = str(Path(cwd).resolve())
    exposed = json.dumps([*project.paths(), place])
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-E",
            str(Path(__file__).with_name("root.py")),
            base,
            mountpoint,
            exposed,
            place,
            *command,
        ],
        env={"PATH": PATH, "HOME": "/root", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise CommandFailed(done.returncode, command, done.stdout, done.stderr)
    return done

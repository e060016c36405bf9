"""Builds C sources of `slurm_plugin/` with the sanitizers, as a program."""

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLUGIN = HERE.parent.parent / "slurm_plugin"
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-fsanitize=address,undefined"]
FLAGS += ["-fno-sanitize-recover=all", f"-I{PLUGIN}"]


def build(program: Path, *sources: Path) -> Path:
    """Compile `sources` to `program`; any warning is an error."""
    subprocess.run([os.environ.get("CC", "cc"), *FLAGS, "-o", program, *sources], check=True)
    return program

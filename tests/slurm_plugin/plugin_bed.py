"""The plugin as a site has it: built for a Slurm version and loaded on a bed."""

import fcntl
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Bed, install
from tests.cluster.fixtures import open_bed
from tests.slurm_plugin.building import PLUGIN

VERSIONS = ["22.05", *(pytest.param(version, marks=pytest.mark.slurm_matrix) for version in ("24.11", "26.05"))]
COMMANDS = ["sbatch", "salloc", "srun"]
# A site whose defaults would end a step with its first task.
HARSH = ["KillOnBadExit=1", "WaitTime=3"]


def built(version: str = "22.05") -> Path:
    """The folder with torchpass.so and the Lua scripts; visible in beds."""
    build = PLUGIN.parent / "build" / f"slurm_plugin-{version}"
    include = build / "include"
    include.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        headers = include / "slurm"
        headers.unlink(missing_ok=True)
        headers.symlink_to(Path(install.root(version)) / "usr/include/slurm")
        command = ["make", "-s", "-C", PLUGIN, f"BUILD={build}", f"SLURM_INCLUDE={include}"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return build


@contextmanager
def plugin_bed(
    version: str = "22.05",
    arguments: str = "",
    scripts: Iterable[str] = (),
    sites: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Bed]:
    """A bed of six nodes with four GPUs each and the plugin with these arguments in plugstack.conf.

    `scripts` names the Lua variants to install, `sites` gives scripts of a site's own that load them.
    """
    try:
        folder = built(version)
    except install.BedUnavailable as reason:
        pytest.skip(str(reason))
    lua = {name: (folder / f"{name}.lua").read_text() for name in scripts}
    for name, text in (sites or {}).items():
        lua[name] = f'dofile("{folder}/{name}.lua")\n{text}'
    settings = {"nodes": 6, "gpus": 4, "slurm_conf": HARSH, **options}
    with open_bed(version=version, plugin=[f"optional {folder}/torchpass.so {arguments}"], lua=lua, **settings) as bed:
        yield bed


@dataclass
class Outcome:
    """What a submission came to: where its tasks ran, and with which GPUs."""

    code: int
    said: str  # by the command, to the user
    tasks: Counter[str]  # node -> tasks that ran there
    gpus: dict[str, set[str]]  # node -> GPUs that they saw

    @property
    def shape(self) -> tuple[int, set[int], set[int]]:
        """(nodes, the numbers of tasks that nodes have, the numbers of GPUs that nodes have)."""
        return len(self.tasks), set(self.tasks.values()), {len(self.gpus[node]) for node in self.tasks}


TASK = "echo task $(hostname) $SLURM_STEP_GPUS"


def submit(bed: Bed, command: str, *options: str) -> Outcome:
    """Run `TASK` in every task of a job; in sbatch and salloc by a plain srun."""
    if command == "sbatch":
        out = bed.share / "submitted.out"
        out.unlink(missing_ok=True)
        end = bed.share / "submitted.end"
        end.unlink(missing_ok=True)
        script = bed.share / "submitted.sh"
        script.write_text(f"#!/bin/bash\nsrun sh -c '{TASK}'\necho $? > {end}\n")
        done = bed.run(["sbatch", "-o", out, *options, script], check=False)
        said = done.stdout + done.stderr
        if done.returncode == 0:  # sbatch -W asks only every few seconds
            bed.wait(lambda: end.exists() and end.read_text(), "the job's end")
        printed = out.read_text() if out.exists() else ""
    else:
        run = ["srun", "sh", "-c", TASK] if command == "salloc" else ["sh", "-c", TASK]
        done = bed.run([command, *options, *run], check=False, timeout=60)
        said, printed = done.stderr, done.stdout
    tasks: Counter[str] = Counter()
    gpus: dict[str, set[str]] = {}
    for node, seen in re.findall(r"^task (\S+) ?(\S*)$", printed, re.MULTILINE):
        tasks[node] += 1
        gpus.setdefault(node, set()).update(filter(None, seen.split(",")))
    return Outcome(done.returncode, said, tasks, gpus)

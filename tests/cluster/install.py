"""What a bed needs from the machine."""

import os
import shutil
import subprocess

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin", "slurmdbd"]
PACKAGES += ["munge", "libslurm-dev", "mariadb-server", "iproute2", "gcc", "libc6-dev"]
PROGRAMS = ["slurmctld", "slurmd", "sbatch", "slurmdbd", "munged", "mariadbd", "ip", "gcc"]


class BedUnavailable(Exception):
    """No bed is possible on this machine; the text says why in one line."""


def root(version: str) -> str:
    """The root file system that has this version of Slurm; installs it first where it is missing."""
    if os.geteuid() != 0:
        raise BedUnavailable("the Slurm test bed needs root")
    if not all(shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") for name in PROGRAMS):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (
            ["apt-get", "update", "-q"],
            ["apt-get", "install", "-yq", "--no-install-recommends", *PACKAGES],
        ):
            subprocess.run(command, env=environment, check=True, capture_output=True)
    return "/"

"""What a bed needs from the machine, and the root file systems of the Slurm versions it can run."""

import fcntl
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "sid"}  # the Debian release that carries the version
SLURM = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin", "slurmdbd"]
SLURM += ["munge", "mariadb-server", "libslurm-dev", "gcc", "libc6-dev"]
# A root of its own also needs what is there on any host, and the libraries that the project's Python links to.
ROOT = ["slurm-wlm-basic-plugins-dev", "iproute2", "procps", "ca-certificates", "libpython3-stdlib", "libexpat1"]
ONLY_LATER = {"slurm-wlm-basic-plugins-dev"}  # bookworm has these headers in libslurm-dev
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BedUnavailable(Exception):
    """No bed is possible on this machine; the text says why in one line."""


def cache() -> Path:
    return Path(os.environ.get("TORCHPASS_BED_ROOTS") or Path.home() / ".cache" / "torchpass")


def root(version: str) -> str:
    """The root file system with this version of Slurm; made on demand: that takes a minute or two, once."""
    if version not in SUITES:
        raise BedUnavailable(f"Slurm {version} cannot be had here; there are {', '.join(SUITES)}")
    if os.geteuid() != 0:
        raise BedUnavailable("the Slurm test bed needs root")
    if _codename() == SUITES[version]:
        programs = ["slurmctld", "slurmd", "sbatch", "slurmdbd", "munged", "mariadbd", "gcc"]
        _packages({"ip": ["iproute2"], **dict.fromkeys([*programs, "/usr/include/slurm/spank.h"], SLURM)})
        return "/"
    path = cache() / version
    _packages({"ip": ["iproute2"]})
    if not path.exists():
        _packages({"debootstrap": ["debootstrap", "debian-archive-keyring"]})
        with _lock():
            if not path.exists():
                _debootstrap(SUITES[version], path, version)
    return str(path)


def _codename() -> str:
    try:
        return platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    except OSError:
        return ""


@contextmanager
def _lock() -> Iterator[None]:
    """One at a time on this machine."""
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _missing(needed: dict[str, list[str]]) -> list[str]:
    def there(name: str) -> bool:
        return os.path.exists(name) if name.startswith("/") else shutil.which(name, path=PATH) is not None

    return sorted({package for name, packages in needed.items() if not there(name) for package in packages})


def _packages(needed: dict[str, list[str]]) -> None:
    """Install the packages of those programs and files that are not there."""
    names = _missing(needed)
    if not names:
        return
    if not shutil.which("apt-get"):
        raise BedUnavailable(f"the Slurm test bed lacks {' '.join(names)} and can install on Debian and Ubuntu only")
    with _lock(), _no_services():
        if names := _missing(needed):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(["apt-get", "update", "-q"], env=environment, capture_output=True)
            _run(["apt-get", "install", "-yq", "--no-install-recommends", *names], environment)


@contextmanager
def _no_services() -> Iterator[None]:
    """Packages start their daemons when they are installed; the bed has its own."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def _debootstrap(suite: str, path: Path, version: str) -> None:
    """Make a root at `path`, all or nothing. In namespaces of its own: whatever it mounts or starts ends with it."""
    new = path.with_name(f"{path.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    packages = [name for name in [*SLURM, *ROOT] if suite != "bookworm" or name not in ONLY_LATER]
    mirror = os.environ.get("TORCHPASS_BED_MIRROR") or "http://deb.debian.org/debian"
    private = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    make = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", suite, str(new), mirror]
    _run([*private, *make], dict(os.environ))
    found = _run(["chroot", str(new), "slurmd", "-V"], {"PATH": PATH})
    if not found.startswith(f"slurm-wlm {version}"):
        raise BedUnavailable(f"Debian {suite} carries {found.strip()} now, not {version}; see SUITES in {__file__}")
    for package in (new / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    new.rename(path)


def _run(argv: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise BedUnavailable(f"{' '.join(argv)[:60]}... failed: {last}")
    return done.stdout

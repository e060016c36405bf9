"""What of the host every bed shows at the same path: the repository, its virtual environment, and that one's Python."""

import stat
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def paths() -> list[str]:
    return [str(REPOSITORY), *(path for path in (sys.prefix, *_base_python()) if path not in ("/", "/usr"))]


def _base_python() -> list[str]:
    if sys.base_prefix not in ("/", "/usr"):
        return [sys.base_prefix]
    # The system's own Python. /usr as a whole must stay that of the Slurm version, so: its program under every name
    # on the way there, and its library.
    program = Path(sys.executable)
    names = []
    while program.is_symlink():
        program = program.parent / program.readlink()
        names.append(str(program))
    return [*(name for name in names if not name.startswith(f"{sys.prefix}/")), sysconfig.get_path("stdlib")]


def hidden(exposed: Iterable[str]) -> str | None:
    """Why somebody in the bed could not read one of these paths, or None."""
    for path in exposed:
        try:
            mode = Path(path).stat().st_mode
        except OSError as error:
            return f"cannot show {path} in the bed: {error.strerror}"
        needed = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
        if mode & needed != needed:
            return f"{path} has mode {stat.S_IMODE(mode):o}: alice could not read it; chmod o+rX it"
    return None

"""The directory of a run: its key, its events, its sockets.

A directory that we make is private to the user. One that was there already keeps its mode, and what must stay secret is
private in it: the key by its own mode, the sockets by that of their directories.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
import time
from pathlib import Path

from tpwrap.core.config import Settings

_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 107 bytes


class RunDir:
    """path: where everything of the run is. log_dir: where a file for each rank goes."""

    def __init__(self, path: Path, log_dir: Path) -> None:
        self.path = path
        self.log_dir = log_dir
        self.key_file = path / "key"
        self._short: tempfile.TemporaryDirectory[str] | None = None

    @staticmethod
    def create(settings: Settings) -> RunDir:
        """Make the directory; ConfigError if it cannot be used."""
        config = settings.config
        # Where logs go by itself is made later, in the run directory; what was asked for is tried before anything else.
        if config.log_dir is not None:
            _make_log_dir(Path(config.log_dir).absolute(), settings)
        try:
            if config.run_dir is None:
                path = _parent() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            else:
                path = Path(config.run_dir).absolute()
                if (path / "events.jsonl").exists():
                    raise settings.error("run_dir", f"{path} holds an earlier run; name another directory")
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise settings.error("run_dir", f"cannot make {e.filename or 'it'}: {e.strerror or e}") from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise settings.error("run_dir", f"{path} cannot be written to; name another directory")
        log_dir = Path(config.log_dir).absolute() if config.log_dir else path / "logs"
        _make_log_dir(log_dir, settings)
        return RunDir(path, log_dir)

    def new_key(self) -> bytes:
        """A fresh key for the job, left in the key file for those who may read it."""
        key = secrets.token_bytes(32)
        self.key_file.unlink(missing_ok=True)
        fd = os.open(self.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as f:
            f.write(key.hex())
        return key

    def socket(self, node: int) -> str:
        """Path for the unix socket of a node's supervisor: in the run directory if that is short enough."""
        path = self.path / f"node{node}" / "socket"
        if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH and _made_private(path.parent):
            path.unlink(missing_ok=True)
            return str(path)
        if self._short is None:
            self._short = tempfile.TemporaryDirectory(prefix="torchpass-", dir="/tmp")
        return f"{self._short.name}/{node}"

    def close(self) -> None:
        """The run has ended: its key is worth nothing any more, its story stays."""
        self.key_file.unlink(missing_ok=True)
        if self._short is not None:
            self._short.cleanup()


def _make_log_dir(path: Path, settings: Settings) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise settings.error("log_dir", f"cannot make {e.filename or path}: {e.strerror or e}") from None


def _made_private(path: Path) -> bool:
    """Make a directory that only we can enter. False: there is one already that others can."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _parent() -> Path:
    """The user's own directory for runs under the system's temporary one."""
    parent = Path(tempfile.gettempdir()) / f"torchpass-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{parent} belongs to somebody else; give --run-dir")
    parent.chmod(0o700)
    return parent

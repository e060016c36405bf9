"""The job's exit code as a file, for srun: Slurm would report the code of a task, dead ones included.

The SPANK plugin names the file (TORCHPASS_VERDICT) and reads it when srun ends.
"""

from __future__ import annotations

import secrets
from pathlib import Path

VARIABLE = "TORCHPASS_VERDICT"


def leave(path: Path, exit_code: int) -> bool:
    """Write `exit_code` to `path`, all at once: whoever sees the file sees the whole of it. Every node does, since
    srun may see the file system of one of them only. False where that is not possible here."""
    own = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        own.write_text(f"{exit_code}\n")
        own.replace(path)
    except OSError:
        return False
    return True

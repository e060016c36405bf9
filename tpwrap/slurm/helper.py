"""The client of the node helper: root on every node of the job, and the only way for a user to drain a node.

Protocol: slurm_plugin/README.md. One line asks, one line answers.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

from tpwrap.slurm.commands import SlurmError

RUN = Path("/run/torchpass")
_FORBIDDEN = re.compile(r"[^ -~]|[\"'\\`$]")
LONGEST_TEXT = 400
_PATIENCE = 20.0
_SAYS = "the node helper says: "
_REFUSED = _SAYS + "refused"


def address(job_id: int, node: str) -> Path:
    """Where the helper of this job listens on this node."""
    return RUN / f"job{job_id}.{node}.sock"


def clean(text: str) -> str:
    """`text` as the helper takes it: printable ASCII on one line, without quotes and backslashes."""
    return _FORBIDDEN.sub("", " ".join(text.split())).lstrip("-")[:LONGEST_TEXT]


def is_final(error: SlurmError) -> bool:
    """Whether it is of no use to ask again."""
    text = str(error)
    return _REFUSED in text and "try again" not in text and "too many" not in text


def ask(path: Path, *words: str) -> None:
    """Send one request, such as 'drain', 'n4', reason. SlurmError if it is refused or nobody answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(path))  # without a time limit: with one, a full queue is an error at once (EAGAIN)
            sock.settimeout(_PATIENCE)
            sock.sendall(" ".join(words).encode("ascii", "replace") + b"\n")
            answer = b""
            while not answer.endswith(b"\n") and (more := sock.recv(1024)):
                answer += more
    except OSError as e:
        raise SlurmError(f"the node helper does not answer ({path}: {e.strerror or e})") from None
    text = answer.decode("ascii", "replace").strip()
    if text != "ok":
        raise SlurmError(f"{_SAYS}{text or 'nothing'}")

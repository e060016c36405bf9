"""What `scontrol show job` tells in Comment: spares left, and each failover, newest last."""

from __future__ import annotations

from collections.abc import Sequence

LIMIT = 1024
"""bytes; Slurm refuses longer ones"""
_MARK = "torchpass: "
_SEPARATOR = " | "


def users_own(comment: str) -> str:
    """The part of `comment` that is not ours."""
    own, mark, _ = comment.rpartition(_MARK)
    if not mark:
        return comment
    return own.removesuffix(_SEPARATOR)


def render(own: str, summary: str, entries: Sequence[str]) -> str:
    """The user's own comment first and whole, then the summary, then as many of the newest entries as there is room
    for. No newline and no double quote, whatever was given: they would break what people pipe the output into."""
    front = f"{own}{_SEPARATOR}" if own else ""
    kept: list[str] = []
    for entry in reversed(entries):
        if _size(_join(front, summary, [entry, *kept], len(entries))) > LIMIT:
            break
        kept.insert(0, entry)
    text = _join(front, summary, kept, len(entries))
    return text if _size(text) <= LIMIT else own.encode()[:LIMIT].decode(errors="ignore")


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


def _join(front: str, summary: str, kept: Sequence[str], total: int) -> str:
    dropped = [f"({total - len(kept)} older)"] if len(kept) < total else []
    return f"{front}{_MARK}" + "; ".join(" ".join(part.replace('"', "").split()) for part in [summary, *dropped, *kept])

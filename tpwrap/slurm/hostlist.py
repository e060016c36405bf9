"""Slurm's short form for lists of nodes: 'n[1-3,07],gpu4'."""

from __future__ import annotations

import re
from itertools import product
from math import prod

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = 100_000


def expand(text: str) -> list[str]:
    """The names in `text`, in order. ValueError if it is no host list.

    Several brackets in one name multiply ('r[1-2]n[1-2]'); leading zeros are kept ('n[08-10]').
    """
    names = [name for part in _split(text) for name in _expand_one(part)]
    if len(names) > _MOST:
        raise ValueError(f"{text!r} names {len(names)} nodes; that cannot be")
    return names


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is not a list of nodes: its brackets do not match")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    if depth:
        raise ValueError(f"{text!r} is not a list of nodes: its brackets do not match")
    return [part for part in [*parts, current] if part]


def _expand_one(part: str) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)  # text, range, text, range, … text
    choices = [[piece] if i % 2 == 0 else _numbers(piece, part) for i, piece in enumerate(pieces)]
    if prod(map(len, choices)) > _MOST:
        raise ValueError(f"{part!r} names too many nodes")
    return ["".join(combination) for combination in product(*choices)]


def _numbers(ranges: str, part: str) -> list[str]:
    found: list[str] = []
    for one in ranges.split(","):
        match = _RANGE.fullmatch(one)
        if match is None:
            raise ValueError(f"{part!r} is not a list of nodes: {one!r} is no range")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) > _MOST:
            raise ValueError(f"{part!r} is not a list of nodes: {one!r} is too long")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found

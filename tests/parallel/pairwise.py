"""All pairs: few rows in which every two values of different factors come together, unless a rule leaves them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

Factors = Mapping[str, Sequence[str]]
Row = dict[str, str]
Rule = Callable[[Mapping[str, str]], bool]
Pair = tuple[tuple[str, str], tuple[str, str]]


def valid_pairs(factors: Factors, left_out: Rule) -> list[Pair]:
    """Every pair of values of different factors that may come together, in the order of `factors`."""
    return [
        ((f, a), (g, b))
        for f, g in combinations(factors, 2)
        for a in factors[f]
        for b in factors[g]
        if not left_out({f: a, g: b})
    ]


def pairs_of(row: Mapping[str, str], factors: Factors) -> Iterator[Pair]:
    return ((((f, row[f]), (g, row[g]))) for f, g in combinations(factors, 2))


def rows(factors: Factors, left_out: Rule, begun: Iterable[Row] = ()) -> list[Row]:
    """Rows that hold all valid pairs; the same ones each time. begun: rows that come first, whatever they bring.

    Greedy: a row starts from a pair that is missing and takes, factor by factor, the value that brings most missing
    pairs, the first such one. left_out looks at partial rows too. Raises ValueError where a pair fits into no row.
    """
    made = [dict(row) for row in begun]
    covered = {pair for row in made for pair in pairs_of(row, factors)}
    missing = dict.fromkeys(pair for pair in valid_pairs(factors, left_out) if pair not in covered)
    while missing:
        row = _filled(dict(next(iter(missing))), factors, left_out, missing)
        if row is None:
            raise ValueError(f"{next(iter(missing))} comes together in no row")
        for pair in pairs_of(row, factors):
            missing.pop(pair, None)
        made.append(row)
    return made


def _filled(row: Row, factors: Factors, left_out: Rule, missing: Mapping[Pair, None]) -> Row | None:
    """The row with a value for every factor; None where there is none."""
    open_factors = [f for f in factors if f not in row]
    if not open_factors:
        return {f: row[f] for f in factors}
    factor = open_factors[0]
    place = {f: i for i, f in enumerate(factors)}

    def brings(value: str) -> int:
        def pair(other: str) -> Pair:
            mine, theirs = (factor, value), (other, row[other])
            return (mine, theirs) if place[factor] < place[other] else (theirs, mine)

        return sum(pair(other) in missing for other in row)

    values = [value for value in factors[factor] if not left_out({**row, factor: value})]
    for value in sorted(values, key=brings, reverse=True):
        filled = _filled({**row, factor: value}, factors, left_out, missing)
        if filled is not None:
            return filled
    return None

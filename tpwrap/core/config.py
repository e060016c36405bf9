"""What can be configured: one schema, merged from several sources, with errors a person can act on.

Reading the sources is the launcher's work (`tpwrap.launch.config`); here they are data. Each error names the
field, where its value came from, and what to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Unit: TypeAlias = Literal["node", "rank"]

_Count: TypeAlias = Annotated[int, Meta(ge=1, le=100_000)]
_Spares: TypeAlias = Annotated[int, Meta(ge=0, le=100_000)]
_Updates: TypeAlias = Annotated[int, Meta(ge=0, le=1_000_000_000)]
_Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]
_Path: TypeAlias = Annotated[str, Meta(pattern=r"^[^\0]+$")]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a user can set. The field names are the names in every source."""

    nodes: _Count = 1
    nproc_per_node: _Count = 1
    spares: _Spares = 0
    unit: Unit = "node"
    failure_timeout: _Seconds = 10.0
    warm: bool = True
    inject: list[str] = []
    inject_file: _Path | None = None
    run_dir: _Path | None = None
    log_dir: _Path | None = None
    coordinator: _Path | None = None
    strict: bool = False
    check_every: _Updates = 0
    quiet: bool = False


FIELDS: tuple[str, ...] = Config.__struct_fields__

MEANT: dict[str, str] = {
    "nodes": "a whole number of at least 1, for example 4",
    "nproc_per_node": "a whole number of at least 1, for example 8 (one for each GPU)",
    "spares": "a whole number of at least 0, for example 1",
    "unit": "'node' (all ranks of a lost node move together) or 'rank'",
    "failure_timeout": "a number of seconds above 0, for example 10",
    "warm": "true or false",
    "inject": "a fault such as 'rank=1 step=20 phase=backward kill'",
    "inject_file": "the path of a file with one fault a line",
    "run_dir": "a directory that holds no earlier run",
    "log_dir": "a directory",
    "coordinator": "the name of a node of the job, as Slurm calls it",
    "strict": "true or false",
    "check_every": "a whole number of updates, for example 100; 0: only after recoveries",
    "quiet": "true or false",
}
"""What a valid value looks like, in the words of the error message."""


class ConfigError(Exception):
    """One field is wrong. Its text is one line: the field, its value and source, and what to write."""


class Source(msgspec.Struct, frozen=True):
    """Values from one place.

    spelling: how a field is written there, with {field}, {dashed} or {upper} in it.
    text: everything there is text (command line, environment), so "4" is a number.
    """

    spelling: str
    values: Mapping[str, object]
    text: bool = False

    def spell(self, field: str) -> str:
        """How a message names the field in this source."""
        return self.spelling.format(field=field, dashed=field.replace("_", "-"), upper=field.upper())


class Settings(msgspec.Struct, frozen=True):
    """The merged configuration and, for each field that a source set, how that source spells it."""

    config: Config
    origin: dict[str, str]

    def error(self, field: str, problem: str) -> ConfigError:
        """An error about a field whose value only shows to be wrong later."""
        return ConfigError(f"{self.origin.get(field, f'{field} (default)')}: {problem}")


def merge(sources: Sequence[Source]) -> Settings:
    """The first source that sets a field wins; what none sets keeps its default."""
    for source in sources:
        for name in source.values:
            if name not in FIELDS:
                raise ConfigError(_unknown(source, name))
    values: dict[str, object] = {}
    origin: dict[str, str] = {}
    for field in FIELDS:
        for source in sources:
            if field not in source.values:
                continue
            values[field] = _checked(field, source.values[field], source)
            origin[field] = source.spell(field)
            break
    return Settings(config=msgspec.convert(values, Config), origin=origin)


def _checked(field: str, value: object, source: Source) -> object:
    """`value` in the field's type, or a ConfigError."""
    if field == "inject" and isinstance(value, str):
        value = [part.strip() for part in value.replace("\n", ";").split(";") if part.strip()]
    try:
        one = msgspec.convert({field: value}, Config, strict=not source.text)
    except msgspec.ValidationError:
        raise ConfigError(f"{source.spell(field)} is {value!r}, but must be {MEANT[field]}") from None
    checked: object = getattr(one, field)
    return checked


def _unknown(source: Source, name: str) -> str:
    close = difflib.get_close_matches(name, FIELDS, n=1)
    hint = f"did you mean {source.spell(close[0])}?" if close else f"known are: {', '.join(FIELDS)}"
    return f"{source.spell(name)}: there is no setting {name!r}; {hint}"


def near_miss(name: str) -> str | None:
    """The setting that `name` is probably a misspelling of, if any."""
    close = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8)
    return close[0] if close else None

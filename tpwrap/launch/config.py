"""Reads the sources of the configuration: command line, environment, torchpass.toml."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tpwrap.core.config import FIELDS, ConfigError, Settings, Source, merge, near_miss
from tpwrap.core.faults import Fault, parse, parse_file
from tpwrap.core.job import Job
from tpwrap.core.timeouts import Timeouts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "torchpass.toml"
PREFIX = "TORCHPASS_"
_LONGEST_FAULTS = 1 << 20


def load(
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    directory: Path,
    explicit_file: str | None = None,
) -> Settings:
    """Merge all sources, the command line first.

    `command_line` holds only what was given there. `explicit_file` (--config) must exist; torchpass.toml in
    `directory` may be absent.
    """
    sources = [Source("--{dashed} (command line)", command_line, text=True), _environment(environment)]
    file = _file(directory, explicit_file)
    if file is not None:
        sources.append(file)
    return merge(sources)


def make_job(settings: Settings) -> Job:
    """The job that the settings describe; what only shows now (a fault for a rank that is not there) is an
    error of the field it comes from."""
    config = settings.config
    faults = [*_faults(settings), *_faults_of_file(settings)]
    try:
        Timeouts.derive(config.failure_timeout)
        return Job(
            nodes=config.nodes,
            nproc_per_node=config.nproc_per_node,
            spares=config.spares,
            unit=config.unit,
            warm=config.warm,
            failure_timeout=config.failure_timeout,
            strict=config.strict,
            check_every=config.check_every,
            faults=tuple(faults),
        )
    except ValueError as e:
        field, _, problem = str(e).partition(": ")
        if field == "inject" and not config.inject:
            field = "inject_file"
        raise settings.error(field, problem) from None


def _faults(settings: Settings) -> Iterator[Fault]:
    for text in settings.config.inject:
        try:
            yield parse(text)
        except ValueError as e:
            raise settings.error("inject", str(e)) from None


def _faults_of_file(settings: Settings) -> tuple[Fault, ...]:
    name = settings.config.inject_file
    if name is None:
        return ()
    try:
        with open(name, "rb") as f:
            data = f.read(_LONGEST_FAULTS + 1)
        if len(data) > _LONGEST_FAULTS:
            raise ValueError(f"it is longer than {_LONGEST_FAULTS >> 20} MiB; give a file with one fault a line")
        return parse_file(data.decode("utf-8"))
    except OSError as e:
        raise settings.error("inject_file", f"cannot read {name}: {e.strerror}") from None
    except ValueError as e:
        raise settings.error("inject_file", f"{name}: {e}") from None


def _environment(environment: Mapping[str, str]) -> Source:
    values: dict[str, object] = {}
    for name, value in environment.items():
        if not name.startswith(PREFIX):
            continue
        field = name.removeprefix(PREFIX).lower()
        if field in FIELDS:
            values[field] = value
        elif (meant := near_miss(field)) is not None:
            # Other programs may use the prefix too; only what looks like a slip is an error.
            raise ConfigError(
                f"{name} (environment): there is no setting {field!r}; did you mean {PREFIX}{meant.upper()}?"
            )
    return Source(PREFIX + "{upper} (environment)", values, text=True)


def _file(directory: Path, explicit: str | None) -> Source | None:
    path = Path(explicit) if explicit is not None else directory / FILE_NAME
    if explicit is None and not path.exists():
        return None
    try:
        with path.open("rb") as f:
            data = tomllib.load(f)
    except OSError as e:
        raise ConfigError(f"--config {path}: cannot read it: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not valid TOML: {e}") from None
    values = {key.replace("-", "_"): value for key, value in data.items()}
    # The path may hold braces, which mean something in a spelling.
    shown = str(path).replace("{", "{{").replace("}", "}}")
    return Source("{field} (" + shown + ")", values)

"""The story of a run as a table."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpwrap.core import events
from tpwrap.report import story

_STYLE: dict[type[events.Event], str] = {
    events.RankFailed: "red",
    events.NodeDown: "red",
    events.SpareLost: "yellow",
    events.FaultInjected: "magenta",
    events.FailoverFinished: "green",
    events.Protection: "cyan",
}


def read(run_dir: Path) -> list[tuple[float, events.Event]]:
    """The events of a run, with their times; ValueError, in one line, if there are none that can be read."""
    path = run_dir / "events.jsonl"
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        raise ValueError(
            f"{run_dir} has no events.jsonl, so it is not the directory of a run; tpwrap names that in its second line"
        ) from None
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    recorded: list[tuple[float, events.Event]] = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n") or not line.strip():
            continue  # the last one, as it is being written
        try:
            recorded.append(events.from_line(line))
        except (msgspec.MsgspecError, ValueError):
            raise ValueError(f"{path}:{number} is no event of this version of torchpass") from None
    if not recorded:
        raise ValueError(f"{path} holds no events yet")
    return recorded


def show(run_dir: Path) -> None:
    """Print run_dir/events.jsonl: when (since the start), what, and in which words."""
    recorded = read(run_dir)
    begin = recorded[0][0]
    table = Table(title=f"{run_dir.name}, started {datetime.fromtimestamp(begin):%Y-%m-%d %H:%M:%S}")
    table.add_column("second", justify="right")
    table.add_column("event")
    table.add_column("what happened", overflow="fold")
    names = {e.node: e.name for _, e in recorded if isinstance(e, events.NodeJoined) and e.name}
    for time, event in recorded:
        style = _STYLE.get(type(event), "")
        kind = str(event.__struct_config__.tag).replace("_", " ")
        table.add_row(f"{time - begin:.3f}", Text(kind, style), Text(story.full(event, names), style))
    Console().print(table)

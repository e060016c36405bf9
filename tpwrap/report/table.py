"""The story of a run as a table."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

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
}


def show(run_dir: Path) -> None:
    """Print run_dir/events.jsonl: when (since the start), what, and in which words."""
    lines = (run_dir / "events.jsonl").read_bytes().splitlines()
    recorded = [events.from_line(line) for line in lines if line.strip()]
    if not recorded:
        raise ValueError(f"{run_dir}: no events")
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

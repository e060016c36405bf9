from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Run


@pytest.fixture
def tpwrap(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts `tpwrap`; afterwards nothing of it may be left."""
    runs: list[Run] = []

    def start(*arguments: str, **options: object) -> Run:
        place = tmp_path / f"run{len(runs)}"
        place.mkdir()
        runs.append(Run(place, *arguments, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.kill_all()
        run.assert_nothing_left()

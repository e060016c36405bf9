"""What a warm process has imported before it is needed: all that the script imports, from its first moment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import EXAMPLE, processes_of, tpwrap, wait_for
from tpwrap.core import events

THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
CRASH = """
import os
with open('/proc/self/comm') as f:
    if f.read().startswith('tp-zygote'):
        os.abort()
"""


def named(run_dir: Path, *names: str) -> int | None:
    return next((pid for pid, name in processes_of(run_dir).items() if name in names), None)


def test_the_zygote_imports_for_all_warm_processes(tmp_path: Path) -> None:
    loaded: list[bool] = []

    def look(run_dir: Path) -> None:
        # The slot's first process holds the rank; the second one is warm beside it.
        pid = wait_for(lambda: named(run_dir, "tp-n1s0w1"))
        loaded.append("/sklearn/" in Path(f"/proc/{pid}/maps").read_text())

    run = tpwrap(tmp_path, [*EXAMPLE["digits"], "--epochs", "40"], nodes=2, during=look)
    assert run.code == 0, run.output
    assert loaded == [True]


@pytest.mark.parametrize(("module", "words"), [(THREAD, "some start threads"), (CRASH, "")], ids=["thread", "crash"])
def test_modules_that_a_zygote_cannot_have_are_left_to_the_workers(
    module: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "troublesome.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")
    script = tmp_path / "train.py"
    script.write_text(f"import runpy, troublesome\nrunpy.run_path({EXAMPLE['gpt'][0]!r}, run_name='__main__')\n")
    arguments = [str(script), *EXAMPLE["gpt"][1:]]
    arguments[arguments.index("--steps") + 1] = "400"
    killed: list[int] = []

    def kill_when_warm(run_dir: Path) -> None:
        wait_for(lambda: named(run_dir, "tp-n1s0w1", "tp-n1s0w2", "tp-n1s0w3"))
        if words:
            wait_for(lambda: words in (tmp_path / "output.txt").read_text())
        lines = (run_dir / "events.jsonl").read_text().splitlines()
        found = [event for _, event in map(events.from_line, lines) if isinstance(event, events.WorkerAssigned)]
        killed.extend(one.pid for one in found if one.rank == 1)
        os.kill(killed[0], signal.SIGKILL)

    run = tpwrap(tmp_path, arguments, nodes=2, during=kill_when_warm)
    assert run.code == 0, run.output
    assert len(run.of(events.FailoverFinished)) == 1

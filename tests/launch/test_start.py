"""What a script finds when it starts, on each way of starting it; and how its own ending is told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import ROOT, Run, comm

Start = Callable[..., Run]

SCRIPT = """\
import json, os, sys
report = {
    "argv": sys.argv[1:], "name": __name__, "file": os.path.basename(__file__), "cwd": os.getcwd(),
    "path": sys.path[0], "hash": hash("x"), "stdin": sys.stdin.read(),
    "threads": __import__("torch").get_num_threads(),
    "env": {k: os.environ.get(k) for k in (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "MINE", "SITE",
    )},
    "main": sys.modules["__main__"].__dict__ is globals(),
}
with open(f"{os.environ['REPORTS']}/{os.environ['RANK']}.json", "w") as f:
    json.dump(report, f)
print("hello from", os.environ["RANK"])
print("oops from", os.environ["RANK"], file=sys.stderr)
"""


def reports(path: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads((path / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.parametrize("way", ["forked", "module", "executed", "shell"])
def test_what_a_script_finds(way: str, tpwrap: Start, tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "report.py").write_text(SCRIPT)
    # A module of the user's that has the name of one of ours or of the standard library must not hurt.
    (tmp_path / "logging.py").write_text("raise ImportError('this is the user\\'s logging')")
    command = {
        "forked": [sys.executable, "pkg/report.py", "a", "b c"],
        "module": [sys.executable, "-m", "pkg.report", "a", "b c"],
        "executed": [sys.executable, "-W", "default", "pkg/report.py", "a", "b c"],
        "shell": ["bash", "-c", f"export MINE=shell; {sys.executable} pkg/report.py a 'b c'"],
    }[way]
    if way == "module":
        (tmp_path / "logging.py").unlink()  # here Python itself puts the current directory first
    # The start-up file of the user's that ours stands in front of, where a worker is executed.
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import os; os.environ['SITE'] = 'user'")
    env = {"REPORTS": str(tmp_path), "MINE": "mine", "OMP_NUM_THREADS": "2"}
    env["PYTHONPATH"] = f"{ROOT}:{tmp_path}/site"
    local = 2 if way == "forked" else 1  # each executed process imports torch anew
    run = tpwrap(
        "--nodes", "2", "--nproc-per-node", str(local), "--no-warm", *command, env=env, cwd=tmp_path
    )  # fmt: skip
    assert run.wait(110) == 0, run.text()
    world = 2 * local
    found = reports(tmp_path, world)
    for rank, report in enumerate(found):
        assert report["argv"] == ["a", "b c"]
        assert (report["name"], report["file"], report["stdin"]) == ("__main__", "report.py", "")
        assert report["main"]
        assert report["cwd"] == str(tmp_path)
        assert report["path"] == str(tmp_path if way == "module" else package)
        env = report["env"]
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), str(world))
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(rank % local), str(local))
        assert env["GROUP_RANK"] == str(rank // local)
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert int(env["MASTER_PORT"]) > 0
        assert env["TORCHELASTIC_RUN_ID"]
        assert env["MINE"] == ("shell" if way == "shell" else "mine")
        assert env["SITE"] == "user"
        assert report["threads"] == 2
    assert len({report["hash"] for report in found}) == 1
    for rank in range(world):
        assert f"[rank {rank}] hello from {rank}\n" in run.text()
        assert sorted(run.log(f"rank{rank}").splitlines()) == [f"hello from {rank}", f"oops from {rank}"]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("import sys; sys.exit(5)", 5, "exit code 5"),
        ("import sys; sys.exit('no data in /data')", 1, "failed: the script exited: no data in /data"),
        ("def f():\n    return 1 / 0\nf()", 1, "ZeroDivisionError: division by zero"),
    ],
    ids=["exit", "exit-text", "raise"],
)
def test_script_that_fails_everywhere(body: str, code: int, words: str, tpwrap: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(body)
    run = tpwrap("--nodes", "2", "--spares", "1", sys.executable, str(script))
    assert run.wait(110) == code, run.text()
    assert words in run.text()
    if "return 1 / 0" in body:
        assert run.text().count("return 1 / 0") == 1, run.text()


def test_usage_errors_come_before_anything_starts(tmp_path: Path, tpwrap: Start) -> None:
    for arguments, words in (
        ([], "COMMAND is missing"),
        (["--nodes", "none", "true"], "--nodes (command line) is 'none'"),
        (["no-such-program"], "no such program"),
        (["missing.py"], "cannot open 'missing.py'"),
        (["--inject", "rank=5 step=1 phase=forward kill", "true"], "--inject (command line)"),
        (["--inject-file", "/dev/zero", "true"], "--inject-file (command line): /dev/zero: it is longer than 1 MiB"),
        (["--config", "none.toml", "true"], "--config none.toml"),
        (["--run-dir", "/dev/null/x", "true"], "--run-dir (command line): cannot make /dev/null/x: Not a directory"),
        (["--log-dir", "/dev/null/x", "true"], "--log-dir (command line): cannot make /dev/null/x: Not a directory"),
    ):
        run = tpwrap(*arguments)
        assert run.wait() == 2
        assert run.text().startswith("tpwrap: ")
        assert words in run.text()
        assert run.text().count("\n") == 1
        assert not run.dir.exists()


def test_run_directory_is_not_used_twice(tpwrap: Start) -> None:
    run = tpwrap("true")
    run.process.kill()
    run.wait()
    run.dir.mkdir(exist_ok=True)
    (run.dir / "events.jsonl").touch()
    again = tpwrap("--run-dir", str(run.dir), "true")
    assert again.wait() == 2
    assert "holds an earlier run" in again.text()


def test_help_teaches(tpwrap: Start) -> None:
    run = tpwrap("--help")
    assert run.wait() == 0
    for words in (
        "--spares",
        "Example",
        "tp.batches(loader)",
        "Exit codes",
        "torchpass.toml",
        "LOG_DIR/rank",
    ):
        assert words in run.text()


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, tpwrap, tpwrap.cli, tpwrap.launch.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_real_workers_end_on_ctrl_c(tpwrap: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('started')\ntime.sleep(600)\n")
    run = tpwrap("--nodes", "2", "--spares", "1", sys.executable, str(script))
    run.until(lambda: run.text().count("] started") == 2, "both ranks", 110)
    for pid in run.pids():
        if comm(pid).startswith("tp-zygote"):
            # A fork of a process with threads may inherit locks that nobody will ever release.
            assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
    run.process.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    run.assert_nothing_left(0.5)
    assert "Traceback" not in run.text()

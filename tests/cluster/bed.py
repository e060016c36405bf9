"""`Bed`: the handle that tests hold on a cluster."""

import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.cluster import config, install, project
from tests.cluster.install import BedUnavailable

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
USERS = {"root": 0, "alice": 2001, "bob": 2002}
ORDINARY = {name: uid for name, uid in USERS.items() if uid}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENDED: tuple[str, ...] = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED")
ENDED += ("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")

__all__ = ["Bed", "BedError", "BedUnavailable", "CommandFailed"]


class BedError(Exception):
    """The bed refused a verb, or something did not happen in time."""


class CommandFailed(subprocess.CalledProcessError):
    """A command in the bed failed; says what it printed."""

    def __str__(self) -> str:
        return f"{shlex.join(map(str, self.cmd))} ended with {self.returncode}\n{self.stdout or ''}{self.stderr or ''}"


class Bed:
    """A Slurm cluster of `nodes` nodes n1, n2, ...; all of it ends with `stop`, or with the process that made it.

    plugin      lines of plugstack.conf
    lua         {"cli_filter": text, "job_submit": text}
    prolog, epilog   a path that is visible in the bed, or the text of a script ("#!...")
    slurm_conf  lines that replace the defaults of the same key
    expose      further folders or files of the host to be seen at the same path (the repository, the virtual
                environment and its Python always are)
    """

    def __init__(
        self,
        nodes: int = 6,
        gpus: int = 4,
        version: str = "22.05",
        plugin: Sequence[str] | None = None,
        prolog: str | Path | None = None,
        epilog: str | Path | None = None,
        prolog_flags: str = "Alloc,Contain",
        slurm_conf: Iterable[str] = (),
        lua: Mapping[str, str] | None = None,
        dbd: bool = False,
        expose: Iterable[str | Path] = (),
    ) -> None:
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.gpus = gpus
        self.version = version
        self.dbd = dbd
        self._plugin = plugin or []
        self._scripts = {"prolog": prolog, "epilog": epilog}
        self._prolog_flags = prolog_flags
        self._slurm_conf = list(slurm_conf)
        self._lua = dict(lua or {})
        self._expose = [str(path) for path in expose]
        self._keeper: subprocess.Popen[str] | None = None
        self._world = 0
        self.dir = Path()

    # --- life -------------------------------------------------------------------------------------

    def start(self, folder: Path | None = None, *, lifeline: bool = True) -> None:
        """Boot everything and wait until all nodes are idle. Without `lifeline` the bed outlives this process."""
        base = install.root(self.version)
        if reason := project.hidden(project.paths()):
            raise BedUnavailable(reason)
        if reason := project.hidden(self._expose):
            raise BedError(f"expose: {reason}")
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="torchpass-bed-"))
        else:
            folder.mkdir()
        folder.chmod(0o755)
        self.dir = folder
        try:
            self._write_files()
            self._start_world(base, lifeline)
            self._ask("begin")
            self.wait(self._all_idle, "all nodes are idle", 30)
        except BaseException:
            self.stop()
            raise

    @classmethod
    def attach(cls, folder: Path) -> "Bed":
        """A handle on a bed that another process started."""
        about = json.loads((folder / "bed.json").read_text())
        bed = cls(**about["options"])
        bed.dir, bed._world = folder, about["world"]
        return bed

    def stop(self) -> None:
        """End everything; returns when nothing of it is left."""
        if self._keeper is not None:
            self._keeper.terminate()
            self._keeper.communicate()
            self._keeper = None
        elif self._world:
            try:
                self._ask("end")
                self.wait(lambda: not self.dir.exists(), "its keeper removes the folder", 10)
            except BedError:
                pass  # it had ended before
        self._world = 0
        shutil.rmtree(self.dir, ignore_errors=True)  # the keeper does this, if it lives that long

    def __enter__(self) -> "Bed":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _write_files(self) -> None:
        folder = str(self.dir)
        spools = [f"spool/{node}" for node in self.nodes]
        for name in ("share", "log", "state", "run", "dev", "root", "etc", "etc/slurm", "home", "spool", *spools):
            (self.dir / name).mkdir()
            (self.dir / name).chmod(0o1777 if name == "share" else 0o755)
        for user, uid in ORDINARY.items():
            (self.dir / "home" / user).mkdir(mode=0o700)
            os.chown(self.dir / "home" / user, uid, uid)
        for number in range(self.gpus):
            device = self.dir / "dev" / f"nvidia{number}"
            os.mknod(device, 0o020666, os.makedev(1, 3))  # Slurm wants a character device; this is /dev/null's
            device.chmod(0o666)
        (self.dir / "etc/munge.key").write_bytes(secrets.token_bytes(1024))
        (self.dir / "etc/munge.key").chmod(0o400)
        scripts: dict[str, str | None] = {}
        for name, script in self._scripts.items():
            if isinstance(script, str) and script.startswith("#!"):
                self._etc(name, script).chmod(0o755)
                scripts[name] = f"/etc/slurm/{name}"
            else:
                scripts[name] = None if script is None else str(script)
        for name, text in self._lua.items():
            self._etc(f"{name}.lua", text)
        self._etc("plugstack.conf", "".join(f"{line}\n" for line in self._plugin))
        count = len(self.nodes)
        self._etc("gres.conf", config.gres_conf(folder, nodes=count, gpus=self.gpus))
        self._etc("cgroup.conf", config.cgroup_conf(self.version))
        if self.dbd:
            self._etc("slurmdbd.conf", config.slurmdbd_conf(folder)).chmod(0o600)
        self._etc(
            "slurm.conf",
            config.slurm_conf(
                folder,
                self.version,
                nodes=count,
                gpus=self.gpus,
                prolog=scripts["prolog"],
                epilog=scripts["epilog"],
                prolog_flags=self._prolog_flags,
                lua=self._lua,
                dbd=self.dbd,
                extra=self._slurm_conf,
            ),
        )

    def _etc(self, name: str, text: str) -> Path:
        path = self.dir / "etc/slurm" / name
        path.write_text(text)
        path.chmod(0o644)
        return path

    def _start_world(self, base: str, lifeline: bool) -> None:
        spec = {
            "dir": str(self.dir),
            "base": base,
            "nodes": len(self.nodes),
            "exposed": [str(self.dir), *project.paths(), *self._expose],
            "users": ORDINARY,
            "dbd": self.dbd,
            "lifeline": lifeline,
        }
        with open(self.dir / "log/world.out", "w") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-S", "-E", str(HERE / "world.py"), json.dumps(spec)],
                stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a signal to the runner's process group must not reach it
            )
        assert self._keeper.stdout is not None
        told = self._keeper.stdout.readline()
        answer = json.loads(told or '{"problem": "its keeper ended"}')
        if answer["problem"] is not None:
            raise BedUnavailable(f"no bed is possible here: {answer['problem']}")
        self._world = answer["pid"]
        options = {"nodes": len(self.nodes), "gpus": self.gpus, "version": self.version, "dbd": self.dbd}
        (self.dir / "bed.json").write_text(json.dumps({"world": self._world, "options": options}))

    def _ask(self, verb: str, *arguments: object) -> Any:
        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.connect(f"{self.dir}/control")
                line.sendall(json.dumps([verb, *arguments]).encode() + b"\n")
                answer = line.makefile().readline()
            except OSError:
                answer = ""
        if not answer:
            raise BedError("this bed has ended")
        ok, value = json.loads(answer)
        if not ok:
            raise BedError(f"{value}\n{self.logs()}" if verb == "begin" else value)
        return value

    def _all_idle(self) -> bool:
        states = self.run(["sinfo", "-h", "-N", "-o", "%T"], user="root", check=False).stdout.split()
        return states == ["idle"] * len(self.nodes)

    # --- commands ---------------------------------------------------------------------------------

    @property
    def share(self) -> Path:
        """The shared file system: the same path on the host and in every node; anybody may write."""
        return self.dir / "share"

    def command(self, argv: Sequence[str | Path], user: str, node: str | None, cwd: str | Path | None) -> list[str]:
        """What to run on the host so that `argv` runs in the bed."""
        inside = self._ask("pid", node) if node else 0
        enter = [sys.executable, "-S", "-E", str(HERE / "enter.py"), str(self._world), str(inside), f"{self.dir}/root"]
        uid = USERS.get(user)
        if uid is None:
            raise BedError(f"no user {user}; there are {', '.join(USERS)}")
        return [*enter, str(uid), str(cwd or self.share), *map(str, argv)]

    def environment(self, user: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
        home = "/root" if user == "root" else f"/home/{user}"
        return {"PATH": PATH, "HOME": home, "USER": user, "LOGNAME": user, "LC_ALL": "C.UTF-8", **(env or {})}

    def popen(
        self,
        argv: Sequence[str | Path],
        user: str = "alice",
        node: str | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> "subprocess.Popen[str]":
        """Start a command in the bed, on the controller's host or on `node`; `options` go to subprocess.Popen."""
        settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "text": True, **options}
        return subprocess.Popen(self.command(argv, user, node, cwd), env=self.environment(user, env), **settings)

    def run(
        self,
        argv: Sequence[str | Path],
        user: str = "alice",
        node: str | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 30,
        input: str | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in the bed to its end."""
        streams: dict[str, Any] = {"stdin": subprocess.PIPE} if input is not None else {}
        process = self.popen(argv, user, node, cwd, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **streams)
        with process:
            try:
                out, err = process.communicate(input, timeout)
            except BaseException:
                process.kill()
                raise
        command = [str(word) for word in argv]
        if check and process.returncode != 0:
            raise CommandFailed(process.returncode, command, out, err)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def sbatch(
        self,
        script: str,
        *options: str,
        user: str = "alice",
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Submit a batch script, given as text; its job id."""
        if not script.startswith("#!"):
            script = f"#!/bin/bash\n{script}"
        handle, path = tempfile.mkstemp(prefix="job-", suffix=".sh", dir=self.share)
        with open(handle, "w") as file:
            file.write(script)
        os.chown(path, USERS[user], USERS[user])
        done = self.run(["sbatch", "--parsable", *options, path], user, cwd=cwd, env=env)
        return int(done.stdout.split(";")[0])

    # --- what Slurm says --------------------------------------------------------------------------

    def job(self, job: int) -> dict[str, str]:
        return fields(self.run(["scontrol", "show", "job", str(job)], user="root").stdout)

    def node(self, name: str) -> dict[str, str]:
        return fields(self.run(["scontrol", "show", "node", name], user="root").stdout)

    def wait(self, condition: Callable[[], T], what: str, seconds: float = 30) -> T:
        """Wait until `condition()` is true and return its value."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > end:
                raise BedError(f"not within {seconds} s: {what}\n{self.logs()}")
            time.sleep(0.03)
        return value

    def wait_job(self, job: int, states: Collection[str], seconds: float = 30) -> dict[str, str]:
        """Wait until the job is in one of `states`; another final state is an error at once."""

        def reached() -> dict[str, str] | None:
            now = self.job(job)
            if now["JobState"] in states:
                return now
            if now["JobState"] in ENDED:
                raise BedError(f"job {job} is {now['JobState']}, not {'/'.join(states)}: {now}\n{self.logs()}")
            return None

        found = self.wait(reached, f"job {job} is {'/'.join(states)}", seconds)
        assert found is not None
        return found

    def logs(self, lines: int = 15) -> str:
        """The last lines of every daemon's log, for failure messages."""
        parts = []
        for path in sorted((self.dir / "log").iterdir()):
            if path.suffix == ".out" and path.with_suffix(".log").exists():
                continue  # the same lines, and the few before the log was open
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            if tail:
                parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)

    # --- faults -----------------------------------------------------------------------------------

    def kill(self, node: str) -> None:
        """Power off: all its processes die at once, and nobody hears of it."""
        self._ask("kill", node)

    def boot(self, node: str) -> None:
        """Power on a killed node, with its link whole. If Slurm noticed, it keeps it DOWN until root resumes it."""
        self._ask("boot", node)

    def freeze(self, node: str) -> None:
        """Stop all its processes; its kernel still answers."""
        self._ask("freeze", node)

    def thaw(self, node: str) -> None:
        self._ask("thaw", node)

    def cut(self, node: str, carrier: bool = False) -> None:
        """Its link loses every packet; with `carrier`, the node also sees the carrier go."""
        self._ask("cut", node, carrier)

    def heal(self, node: str) -> None:
        self._ask("heal", node)

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL for slurmd alone; the job steps of the node go on."""
        self._ask("kill_slurmd", node)

    def start_slurmd(self, node: str) -> None:
        self._ask("start_slurmd", node)

    def kill_slurmctld(self) -> None:
        """SIGKILL for the controller. What it heard in the last 5 s may not be saved, jobs included."""
        self._ask("kill_slurmctld")

    def start_slurmctld(self) -> None:
        """Start the controller again, from its saved state."""
        self._ask("start_slurmctld")


FREE_TEXT = re.compile(r" *(Comment|AdminComment|SystemComment|Extra|Reason|Command|SubmitLine|WorkDir|Std\w+|OS)=(.*)")
FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z_/:]*)=")


def fields(text: str) -> dict[str, str]:
    """The fields of `scontrol show`, from its long form: there, every free text has a line of its own."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if free := FREE_TEXT.fullmatch(line):
            found[free[1]] = free[2].strip()
            continue
        line = line.strip()
        starts = list(FIELD.finditer(line))
        for match, following in itertools.zip_longest(starts, starts[1:]):
            end = following.start() if following else len(line)
            found[match[1]] = line[match.end() : end].strip()
    return found

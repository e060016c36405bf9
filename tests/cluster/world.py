"""The process tree of a bed: a keeper on the host, and below it, as pid 1 of its own namespaces, the world.

    keeper                 on the bed's end (standard input closes, SIGTERM, the world dies) kills the world and removes
                           the folder
      world  (pid 1)       file system, bridge, munged, slurmctld; obeys one verb a connection on DIR/control
        node n1 (pid 1)    its own namespaces inside the world's; starts and kills slurmd when the world says so
        node n2 ...

Run as a script with one argument, a JSON object (see Spec). Whatever the bed's user starts lives inside the world's PID
namespace too, so nothing survives the keeper, and the keeper ends with the process that made the bed.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import linux
import root

CONTROLLER = "10.77.0.1"
SLURMCTLD_PORT, SLURMD_PORT, SLURMDBD_PORT = 6817, 6818, 6819
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


@dataclass
class Spec:
    """What the world is told at its start."""

    dir: str
    base: str  # root file system of the Slurm version
    nodes: int
    exposed: list[str]
    users: dict[str, int]
    dbd: bool
    lifeline: bool  # whether the end of standard input ends the bed


class Refused(Exception):
    """A verb that makes no sense now; its text is the answer."""


def address(number: int) -> str:
    return f"10.77.0.{10 + number}"


def shut(port: str, yes: bool) -> None:
    """Make a port of the bridge drop every frame, or forward again. Carriers stay as they are."""
    # `ip link set ... type bridge_slave state` leaves it forwarding; so does every state but "disabled" without STP
    subprocess.run(["bridge", "link", "set", "dev", port, "state", "0" if yes else "3"], check=True)


def ip(*commands: str, force: bool = False) -> None:
    """Run `ip` commands in this process's network namespace."""
    argv = ["ip", "-force", "-batch", "-"] if force else ["ip", "-batch", "-"]
    done = subprocess.run(argv, input="\n".join(commands), text=True, capture_output=True)
    if done.returncode != 0 and not force:
        raise RuntimeError(f"ip: {done.stderr.strip()} in: {'; '.join(commands)}")


def listening(port: int) -> bool:
    try:
        socket.create_connection((CONTROLLER, port), timeout=1).close()
    except OSError:
        return False
    return True


def accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        return line.connect_ex(path) == 0


def start(argv: list[str], new_root: str, log: str, user: tuple[int, int] | None = None) -> int:
    """Start a daemon inside `new_root`; its output is added to the file `log`."""
    pid = os.fork()
    if pid:
        return pid
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.chroot(new_root)
        os.chdir("/")
        os.setsid()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 4096)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if user is not None:
            os.setgroups([user[1]])
            os.setgid(user[1])
            os.setuid(user[0])
        os.execvpe(argv[0], argv, ENVIRONMENT)
    except BaseException:
        traceback.print_exc()
    os._exit(127)


@dataclass
class Node:
    """A node as the world sees it."""

    number: int
    pid: int = 0  # of its pid 1, in the world's PID namespace; 0: it has no power
    line: socket.socket | None = None  # to its pid 1
    stopped: set[int] = field(default_factory=set)  # processes that `freeze` stopped

    @property
    def name(self) -> str:
        return f"n{self.number}"

    @property
    def port(self) -> str:
        """Its end of the cable on the bridge."""
        return f"v{self.number}"

    def tell(self, word: str) -> None:
        assert self.line is not None
        self.line.sendall(word.encode().ljust(16))
        answer = self.line.recv(200).decode()
        if answer != "ok":
            raise Refused(f"{self.name}: {answer or 'its pid 1 is gone'}")


def node_main(spec: Spec, node: Node, line: socket.socket) -> NoReturn:
    """Pid 1 of a node. The network cable is plugged in before the first word arrives."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
    new_root = f"{spec.dir}/root"
    socket.sethostname(node.name)
    root.furnish(new_root, spec.exposed)
    root.bind(f"{spec.dir}/run", f"{new_root}/run/munge")
    slurmd: int | None = None  # a pidfd
    line.sendall(b"ok")
    while word := line.recv(16, socket.MSG_WAITALL).decode().strip():
        try:
            if slurmd is not None and select.select([slurmd], [], [], 0)[0]:  # it has ended
                os.close(slurmd)
                slurmd = None
            if word == "network":
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                ip(
                    "link set lo up",
                    f"link set eth0 address 02:00:0a:4d:00:{node.number:02x}",
                    f"addr add {address(node.number)}/24 dev eth0",
                    "link set eth0 up",
                    f"route add default via {CONTROLLER}",
                )
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            elif word == "start":
                if slurmd is not None:
                    raise Refused("slurmd runs already")
                slurmd = os.pidfd_open(start(["slurmd", "-D"], new_root, f"{spec.dir}/log/slurmd.{node.name}.out"))
            elif word == "listens":
                end = time.monotonic() + 20
                while slurmd is not None and not _slurmd_listens(new_root):
                    if select.select([slurmd], [], [], 0.005)[0]:
                        raise RuntimeError(f"slurmd ended, see log/slurmd.{node.name}.out")
                    if time.monotonic() > end:
                        raise RuntimeError("slurmd does not listen after 20 s")
            elif word == "kill":
                if slurmd is None:
                    raise Refused("slurmd does not run")
                signal.pidfd_send_signal(slurmd, signal.SIGKILL)
                select.select([slurmd], [], [])
            line.sendall(b"ok")
        except Exception as error:
            line.sendall(str(error).encode()[:200])
    os._exit(0)


def _slurmd_listens(new_root: str) -> bool:
    with open(f"{new_root}/proc/net/tcp") as sockets:
        return any(line.split()[1].endswith(f":{SLURMD_PORT:04X}") and line.split()[3] == "0A" for line in sockets)


class World:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.root = f"{spec.dir}/root"
        self.nodes = {f"n{number}": Node(number) for number in range(1, spec.nodes + 1)}
        self.daemons: dict[str, int] = {}
        self.ended = False

    # --- start ------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """File system and bridge."""
        spec = self.spec
        socket.sethostname("ctl")
        root.make_private()
        root.build(self.root, spec.base, spec.exposed)
        for name in spec.users:
            root.bind(f"{spec.dir}/home/{name}", f"{self.root}/home/{name}")
        self._etc()
        root.bind(f"{spec.dir}/etc/slurm", f"{self.root}/etc/slurm")
        root.furnish(self.root, spec.exposed)
        root.bind(f"{spec.dir}/run", f"{self.root}/run/munge")
        linux.mount("proc", "/proc", "proc")  # ours, so that pids mean the same to us and to /proc
        ip(
            "link set lo up",
            # Without an address of its own it takes the lowest of its ports', hence another one when that port goes,
            # and the nodes send what is meant for the controller to the old one for half a minute.
            "link add br0 address 02:00:0a:4d:00:00 type bridge",
            f"addr add {CONTROLLER}/24 dev br0",
            "link set br0 up",
        )

    def _etc(self) -> None:
        spec, etc = self.spec, f"{self.root}/etc"
        with open(f"{etc}/passwd", "a") as passwd, open(f"{etc}/group", "a") as group:
            for name, uid in spec.users.items():
                # no x, which needs an entry in shadow: Slurm asks su for the environment (sbatch --export=NONE)
                passwd.write(f"{name}:*:{uid}:{uid}::/home/{name}:/bin/bash\n")
                group.write(f"{name}:x:{uid}:\n")
        hosts = ["127.0.0.1 localhost", f"{CONTROLLER} ctl"]
        hosts += [f"{address(node.number)} {node.name}" for node in self.nodes.values()]
        for name, content in (("hosts", "\n".join(hosts) + "\n"), ("hostname", "ctl\n"), ("resolv.conf", "")):
            # an unreachable name server costs slurmd ten seconds at its start
            if os.path.lexists(f"{etc}/{name}"):
                os.unlink(f"{etc}/{name}")
            with open(f"{etc}/{name}", "w") as file:
                file.write(content)

    def _id(self, user: str) -> tuple[int, int]:
        with open(f"{self.root}/etc/passwd") as passwd:
            for line in passwd:
                fields = line.split(":")
                if fields[0] == user:
                    return int(fields[2]), int(fields[3])
        raise RuntimeError(f"no user {user} in {self.spec.base}/etc/passwd: is the package installed?")

    def begin(self) -> None:
        """Daemons and nodes, until the controller hears all of them."""
        folder = self.spec.dir
        for name, user in (("run", "munge"), ("etc/munge.key", "munge"), ("state", "slurm"), ("log", "slurm")):
            os.chown(f"{folder}/{name}", *self._id(user))
        munged = ["munged", "--foreground", f"--key-file={folder}/etc/munge.key", "--socket=/run/munge/munge.socket.2"]
        self._start([*munged, "--pid-file=/run/munge/pid", "--seed-file=/run/munge/seed"], "munge")
        for node in self.nodes.values():
            self._create(node)
        self._until("munged listens", lambda: accepts(f"{folder}/run/munge.socket.2"), "munged")
        if self.spec.dbd:
            self._start_database()
        self._start(["slurmctld", "-D", "-c"])
        self._connect(*self.nodes.values())
        self._await_slurmctld()
        for node in self.nodes.values():
            node.tell("start")

    def _start(self, argv: list[str], user: str | None = None) -> None:
        log = f"{self.spec.dir}/log/{argv[0]}.out"
        self.daemons[argv[0]] = start(argv, self.root, log, self._id(user) if user else None)

    def _start_database(self) -> None:
        """MariaDB (in memory), slurmdbd, and accounts for the users."""
        data, run = "/run/db", "/run/mysqld"
        for path in (data, run):
            os.mkdir(self.root + path)
            os.chown(self.root + path, *self._id("mysql"))
        os.symlink(run, f"{self.root}/run/mariadbd")  # where slurmdbd of 26.05 looks for the socket
        os.chown(f"{self.spec.dir}/etc/slurm/slurmdbd.conf", *self._id("slurm"))
        server = ["--no-defaults", "--user=mysql", f"--datadir={data}", "--innodb-log-file-size=4M"]
        self._command(["mariadb-install-db", *server, "--skip-test-db", "--skip-name-resolve"])
        server += [f"--socket={run}/mysqld.sock", "--skip-networking", "--innodb-buffer-pool-size=64M"]
        self._start(["mariadbd", *server])
        self._until("MariaDB listens", lambda: accepts(f"{self.root}{run}/mysqld.sock"), "mariadbd")
        owner = "'slurm'@'localhost' identified by 'slurm'"
        grant = f"create database slurm_acct_db; grant all on slurm_acct_db.* to {owner}"
        self._command(["mariadb", "--no-defaults", f"--socket={run}/mysqld.sock", "-e", grant])
        self._start(["slurmdbd", "-D"])
        self._until("slurmdbd listens", lambda: listening(SLURMDBD_PORT), "slurmdbd")
        users = ",".join(self.spec.users)
        for entity in ("cluster tp", "account lab", f"user {users} account=lab"):
            self._command(["sacctmgr", "-i", "add", *entity.split()])

    def _command(self, argv: list[str]) -> None:
        """Run a command on the controller's host to its end."""
        log = f"{self.spec.dir}/log/{argv[0]}.out"
        _, status = os.waitpid(start(argv, self.root, log), 0)
        if status != 0:
            raise RuntimeError(f"{argv[0]} failed, see its log")

    def _create(self, node: Node) -> None:
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            try:
                os.closerange(0, 3)
                os.open("/dev/null", os.O_RDWR)
                os.dup2(os.open(f"{self.spec.dir}/log/{node.name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                ours.close()
                linux.unshare(linux.NEWPID | linux.NEWNET | linux.NEWNS | linux.NEWUTS | linux.NEWIPC)
                pid = os.fork()
                if pid == 0:
                    node_main(self.spec, node, theirs)
                os.write(writer, str(pid).encode())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(writer)
        theirs.close()
        node.pid = int(os.read(reader, 20) or 0)
        os.close(reader)
        os.waitpid(middle, 0)
        if not node.pid:
            raise RuntimeError(f"{node.name} has no namespaces: see log/{node.name}.out")
        node.line = ours
        node.stopped = set()

    def _connect(self, *nodes: Node) -> None:
        """Plug the cables of new nodes in."""
        for node in nodes:
            assert node.line is not None
            if node.line.recv(200) != b"ok":
                raise RuntimeError(f"{node.name} does not start: see log/{node.name}.out")
        cables = []
        for node in nodes:
            cables.append(f"link add {node.port} type veth peer name eth0 netns {node.pid}")
            cables.append(f"link set {node.port} master br0 up")
        ip(*cables)
        for node in nodes:
            node.tell("network")

    # --- verbs ------------------------------------------------------------------------------------

    def _node(self, name: str, *, alive: bool = True) -> Node:
        if name not in self.nodes:
            raise Refused(f"no node {name}; there are n1 to n{len(self.nodes)}")
        node = self.nodes[name]
        if alive and not node.pid:
            raise Refused(f"{name} is dead; boot it first")
        return node

    def _awake(self, name: str) -> Node:
        node = self._node(name)
        if node.stopped:
            raise Refused(f"{name} is frozen; thaw it first")
        return node

    def kill(self, name: str) -> None:
        """Power loss: nobody hears a word from the node."""
        node = self._node(name)
        shut(node.port, True)  # else its kernel would close its connections politely
        os.kill(node.pid, signal.SIGKILL)
        self._until(f"{name} is dead", lambda: not node.pid)

    def boot(self, name: str) -> None:
        node = self._node(name, alive=False)
        if node.pid:
            raise Refused(f"{name} runs already; kill it first")
        self._create(node)
        self._connect(node)
        self.start_slurmd(name)

    def _members(self, node: Node) -> list[int]:
        """Processes of a node, the nearest to its pid 1 last."""
        mine = os.stat(f"/proc/{node.pid}/ns/pid").st_ino
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.stat(f"/proc/{entry}/ns/pid").st_ino == mine:
                    found.append(int(entry))
            except OSError:
                pass  # it ended meanwhile, or is a zombie
        return found

    def freeze(self, name: str) -> None:
        """Stop every process of the node; its kernel still answers."""
        node = self._awake(name)

        def running() -> list[int]:
            return [pid for pid in self._members(node) if _state(pid) not in "TtZXx"]

        def stopped() -> bool:
            pids = running()
            for pid in pids:
                node.stopped.add(pid)
                try:
                    os.kill(pid, signal.SIGSTOP)
                except ProcessLookupError:
                    pass
            return not pids

        self._until(f"{name} is frozen", stopped)

    def thaw(self, name: str) -> None:
        node = self._node(name)
        for pid in node.stopped:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
        node.stopped = set()

    def cut(self, name: str, carrier: bool) -> None:
        """Packets vanish; with `carrier` the node also sees its cable pulled out."""
        node = self._node(name)
        if carrier:
            ip(f"link set {node.port} down")
        else:
            shut(node.port, True)

    def heal(self, name: str) -> None:
        port = self._node(name).port
        ip(f"link set {port} up")
        shut(port, False)

    def kill_slurmd(self, name: str) -> None:
        self._awake(name).tell("kill")

    def start_slurmd(self, name: str) -> None:
        node = self._awake(name)
        node.tell("start")
        node.tell("listens")

    def kill_slurmctld(self) -> None:
        pid = self.daemons.pop("slurmctld", 0)
        if not pid:
            raise Refused("slurmctld does not run")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def start_slurmctld(self) -> None:
        if "slurmctld" in self.daemons:
            raise Refused("slurmctld runs already")
        self._start(["slurmctld", "-D"])
        self._await_slurmctld()

    def _await_slurmctld(self) -> None:
        self._until("slurmctld listens", lambda: listening(SLURMCTLD_PORT), "slurmctld")

    def end(self) -> None:
        self.ended = True

    def pid(self, name: str) -> int:
        """The pid 1 of a node in the world's PID namespace."""
        return self._node(name).pid

    # --- life ---------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Take note of what has ended."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.daemons = {name: daemon for name, daemon in self.daemons.items() if daemon != pid}
            for node in self.nodes.values():
                if node.pid == pid and node.line is not None:
                    node.line.close()
                    node.line, node.pid, node.stopped = None, 0, set()
                    ip(f"link del {node.port}", force=True)  # it may have gone with the node

    def _until(self, what: str, condition: Callable[[], bool], daemon: str | None = None) -> None:
        end = time.monotonic() + 20
        while not condition():
            self.reap()
            if daemon is not None and daemon not in self.daemons:
                raise RuntimeError(f"{what}: {daemon} ended, see its log")
            if time.monotonic() > end:
                raise RuntimeError(f"{what}: not within 20 s")
            time.sleep(0.003)

    def serve(self, listener: socket.socket) -> None:
        """One request a connection: [verb, arguments...] as JSON; the answer is [ok, value or message]."""
        verbs: list[Callable[..., Any]] = [self.begin, self.pid, self.kill, self.boot, self.freeze, self.thaw, self.cut]
        verbs += [self.heal, self.kill_slurmd, self.start_slurmd, self.kill_slurmctld, self.start_slurmctld]
        verbs += [self.end]
        named = {verb.__name__: verb for verb in verbs}
        listener.settimeout(1)
        while not self.ended:
            self.reap()
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                try:
                    request = connection.makefile().readline()
                    verb, *arguments = json.loads(request)
                    answer = [True, named[verb](*arguments)]
                except Refused as refusal:
                    answer = [False, str(refusal)]
                except Exception as error:
                    traceback.print_exc()
                    answer = [False, str(error)]
                try:
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                except OSError:
                    pass  # the asker is gone


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def world_main(spec: Spec, ready: int) -> NoReturn:
    """Pid 1 of the world; writes "ok", or what is wrong, to `ready`."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        linux.die_with_parent()
        linux.unshare(linux.NEWNS | linux.NEWNET | linux.NEWUTS | linux.NEWIPC)
        world = World(spec)
        world.prepare()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{spec.dir}/control")
        os.chmod(f"{spec.dir}/control", 0o600)
        listener.listen(16)
    except BaseException as error:
        traceback.print_exc()
        os.write(ready, str(error).encode())
        os._exit(1)
    os.write(ready, b"ok")
    os.close(ready)
    try:
        world.serve(listener)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def keeper(spec: Spec) -> None:
    """Start the world; when the bed ends, for whatever reason, end all of it and remove its folder."""
    os.umask(0o022)
    reader, writer = os.pipe()
    pid = 0
    try:
        linux.unshare(linux.NEWPID)
        pid = os.fork()
        if pid == 0:
            world_main(spec, writer)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
        os.close(writer)
        problem = os.read(reader, 1000).decode() or "it ended"
    except OSError as error:
        problem = str(error)
    try:
        print(json.dumps({"pid": pid, "problem": None if problem == "ok" else problem}), flush=True)
        os.close(1)
        if pid:
            end = os.pidfd_open(pid)
            select.select([end, 0] if spec.lifeline else [end], [], [])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if pid:
            os.kill(pid, signal.SIGKILL)  # and the kernel kills all that live below it, before waitpid returns
            os.waitpid(pid, 0)
        shutil.rmtree(spec.dir, ignore_errors=True)


if __name__ == "__main__":
    keeper(Spec(**json.loads(sys.argv[1])))

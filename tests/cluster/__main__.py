"""A bed to play with: `start` boots it; then `as alice srun -N2 hostname`, `as bob@n1`, `kill n2`, `sh`, ... `stop`."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.bed import Bed, BedError, BedUnavailable

NODE_VERBS = {
    "kill": "power off: silent death of everything on the node",
    "boot": "power on again",
    "freeze": "stop all processes of the node",
    "thaw": "let them go on",
    "cut": "lose every packet of the node's link (--carrier: pull its cable)",
    "heal": "mend the link",
    "kill_slurmd": "SIGKILL for the node's slurmd alone",
    "start_slurmd": "start it again",
}
VERBS = {
    "kill_slurmctld": "SIGKILL for the controller",
    "start_slurmctld": "start it again, from its saved state",
    "stop": "end the bed",
    "logs": "the last lines of all daemons' logs",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    top.add_argument("--bed", default="play", metavar="NAME", help="which bed, where there are several")
    commands = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    start = commands.add_parser("start", help="boot a bed that lives until `stop`")
    start.add_argument("--nodes", type=int, default=6)
    start.add_argument("--gpus", type=int, default=4)
    start.add_argument("--version", default="22.05", help="of Slurm: 22.05, 24.11, 26.05")
    start.add_argument("--dbd", action="store_true", help="with slurmdbd and MariaDB")
    start.add_argument("--plugin", action="append", metavar="LINE", help="a line of plugstack.conf")
    start.add_argument("--conf", action="append", metavar="LINE", help="a line of slurm.conf")
    start.add_argument("--prolog")
    start.add_argument("--epilog")
    command = commands.add_parser("as", help="run a command, or a shell, as a user")
    command.add_argument("who", metavar="USER[@NODE]", help="without a node: on the controller's host")
    command.add_argument("command", nargs=argparse.REMAINDER)
    command = commands.add_parser("sh", help="run a command, or a shell, as root")
    command.add_argument("--node", help="on this node; otherwise on the controller's host")
    command.add_argument("command", nargs=argparse.REMAINDER)
    for verb, text in NODE_VERBS.items():
        command = commands.add_parser(verb.replace("_", "-"), help=text)
        command.add_argument("node")
        if verb == "cut":
            command.add_argument("--carrier", action="store_true")
    for verb, text in VERBS.items():
        commands.add_parser(verb.replace("_", "-"), help=text)
    return top


def enter(bed: Bed, user: str, node: str | None, command: Sequence[str]) -> int:
    """Run a command in the bed; on a terminal under one of its own, so that shells have job control."""
    argv = bed.command(command or ["bash"], user, node, None)
    if sys.stdin.isatty():
        argv = ["script", "--quiet", "--return", "--command", shlex.join(argv), "/dev/null"]
    environment = bed.environment(user, {"TERM": os.environ.get("TERM", "dumb")})
    return subprocess.run(argv, env=environment).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    folder = Path(f"/tmp/torchpass-bed.{options.bed}")
    verb = options.verb.replace("-", "_")
    if verb == "start":
        if folder.exists():
            raise BedError(f"{folder} exists: that bed runs already; `stop` it, or name another with --bed")
        size = {"nodes": options.nodes, "gpus": options.gpus, "version": options.version, "dbd": options.dbd}
        scripts = {"prolog": options.prolog, "epilog": options.epilog}
        bed = Bed(**size, **scripts, plugin=options.plugin, slurm_conf=options.conf or ())
        bed.start(folder, lifeline=False)
        print(f"{options.nodes} nodes are idle; shared folder: {bed.share}")
        return 0
    if not (folder / "bed.json").exists():
        raise BedError(f"no bed {options.bed!r}; `python -m tests.cluster start` boots one")
    bed = Bed.attach(folder)
    if verb == "sh":
        return enter(bed, "root", options.node, options.command)
    if verb == "as":
        user, _, node = options.who.partition("@")
        return enter(bed, user, node or None, options.command)
    if verb == "logs":
        print(bed.logs())
    elif verb == "cut":
        bed.cut(options.node, options.carrier)
    elif verb in NODE_VERBS:
        getattr(bed, verb)(options.node)
    else:
        getattr(bed, verb)()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BedError, BedUnavailable) as problem:
        sys.exit(f"{problem}")

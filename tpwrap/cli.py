"""The commands: `tpwrap` runs a training job, `torchpass` is the operator's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

import tpwrap
from tpwrap.core.config import ConfigError

USAGE = 2
EPILOG = """\b
Example: four ranks, each on an emulated node of its own, and one spare. Rank 1 is killed in the middle of
step 20; training goes on at that step, and ends with the numbers of an undisturbed run:
\b
  tpwrap --nodes 4 --spares 1 --inject 'node=1 step=20 phase=backward kill' python train.py --epochs 3
\b
Rehearse first: a few updates undisturbed and a few with a failure, both compared to the bit. Only if they are
equal the real run starts. With =only nothing else is run. The script's files stay as they are:
\b
  tpwrap --nodes 4 --rehearse python train.py             tpwrap --nodes 4 --rehearse=only python train.py
\b
What is protected is said at the start, in lines with "protected" and "NOT protected"; with --strict the job
ends there, or at the latest in its third step, if anything is not.
\b
COMMAND is what you would type without tpwrap: python train.py …, python -m pkg.train …, or a script that
starts Python once. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the others are set as by torchrun. In
train.py, two lines make it healable:
\b
  tp = tpwrap.session(model=model, optimizer=optimizer, scheduler=scheduler)
  for batch in tp.batches(loader):
\b
Settings: an option wins over the environment (TORCHPASS_SPARES=1, TORCHPASS_FAILURE_TIMEOUT=5, …), that over
torchpass.toml in the current directory (spares = 1), that over the default.
\b
Under Slurm the nodes come from the allocation, and some of them are spares:
\b
  sbatch -N 3 --ntasks-per-node=2 --torchpass-spares=2 …      in it:  srun tpwrap python train.py
\b
Output: each line of a rank appears with its number in front, and without it in LOG_DIR/rank<r>.log. What
happened to the job is shown by: torchpass events RUN_DIR
\b
Exit codes: 0 all ranks have finished; 1 (or the script's own) the script failed, its traceback is shown once;
2 wrong usage or configuration, or --strict; 70 internal error, or what should be equal is not; 75 too few spares
and healthy slots are left; 76 the coordinator is lost; 130 Ctrl-C; 143 SIGTERM.
"""


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class _Run(click.Command):
    """`--rehearse` alone means `--rehearse=run`: click would take the word after it for its value, which is COMMAND."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {name for p in self.params if isinstance(p, click.Option) and p.is_flag for name in p.opts}
        at = 0
        while at < len(args) and args[at].startswith("--"):
            if args[at] == "--rehearse":
                args[at] = "--rehearse=run"
            at += 1 if "=" in args[at] or args[at] in flags else 2
        return super().parse_args(ctx, args)


@click.command(cls=_Run, context_settings={**_HELP, "allow_interspersed_args": False}, epilog=EPILOG)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND...")
@click.option("--nodes", "--nnodes", metavar="N", help="Nodes that train (default 1).")
@click.option("--nproc-per-node", "--nproc_per_node", metavar="N", help="Ranks on each node (default 1).")
@click.option("--spares", metavar="N", help="Further nodes, warm, that replace lost ones (default 0).")
@click.option("--unit", metavar="node|rank", help="What moves when a node is lost (default node).")
@click.option(
    "--failure-timeout",
    metavar="SECONDS",
    help="Silence that counts as death (default 10); all other time limits follow from it.",
)
@click.option("--no-warm", is_flag=True, help="No warm process beside each rank: less memory, longer pause.")
@click.option(
    "--inject",
    multiple=True,
    metavar="FAULT",
    help="Inject a failure, e.g. 'rank=1 step=20 phase=backward kill'. Repeatable.",
)
@click.option("--inject-file", metavar="FILE", help="Faults to inject, one a line.")
@click.option("--strict", is_flag=True, help="End the job if anything of the script is found not to be protected.")
@click.option(
    "--check-every",
    metavar="N",
    help="Compare replicas bit by bit every N updates (default 0: only after recoveries).",
)
@click.option(
    "--rehearse",
    type=click.Choice(["run", "only"]),
    metavar="[=only]",
    help="First run a few updates twice, once with a failure, and compare every bit.",
)
@click.option("--rehearse-steps", type=int, metavar="N", help="Updates in a rehearsal (default 6).")
@click.option("--run-dir", metavar="DIR", help="Where events and sockets go (default: a new one in /tmp).")
@click.option("--log-dir", metavar="DIR", help="Where the log files of ranks go (default: RUN_DIR/logs).")
@click.option("--coordinator", metavar="NODE", help="Under Slurm: the node that decides (default: the batch host).")
@click.option("--quiet", is_flag=True, help="Show the output of ranks and errors only.")
@click.option("--config", metavar="FILE", help="Read this file instead of ./torchpass.toml.")
@click.option("--standalone", is_flag=True, hidden=True, help="Accepted from torchrun's command lines.")
@click.version_option(tpwrap.__version__, prog_name="tpwrap")
def run(
    command: tuple[str, ...],
    config: str | None,
    standalone: bool,
    no_warm: bool,
    rehearse: str | None,
    rehearse_steps: int | None,
    **options: Any,
) -> None:
    """Run a distributed PyTorch training that survives the loss of ranks and nodes.

    A failed rank is replaced while the others wait inside their processes, and training goes on at the same
    step: same world size, same data, same bits.
    """
    from tpwrap.launch import config as sources
    from tpwrap.launch import rehearsal
    from tpwrap.launch.command import check_other_python, recognise
    from tpwrap.launch.local import run_local
    from tpwrap.launch.slurm import run_slurm
    from tpwrap.slurm import step

    given = {name: value for name, value in options.items() if value not in (None, (), False)}
    if "inject" in given:
        given["inject"] = list(given["inject"])
    if no_warm:
        given["warm"] = False
    try:
        if not command:
            raise ConfigError("COMMAND is missing; for example: tpwrap --nodes 2 --spares 1 python train.py")
        if rehearse is None and rehearse_steps is not None:
            raise ConfigError("--rehearse-steps without --rehearse: there is no rehearsal")
        if "TORCHPASS_WORKER" in os.environ:
            raise ConfigError("TORCHPASS_WORKER is set: this is a rank of a job already; run tpwrap once")
        settings = sources.load(given, os.environ, Path.cwd(), config)
        recognised = recognise(command)
        check_other_python(recognised)
        task = step.read(os.environ) if step.is_task(os.environ) else None
        if task is None or (len(task.names) == task.tasks_per_node == 1 and "nodes" in settings.origin):
            job, code = sources.make_job(settings), 0
            if rehearse is not None:
                code = rehearsal.rehearse(settings, job, command, os.environ, rehearse_steps)
            if code == 0 and rehearse != "only":
                code = run_local(settings, job, recognised, os.environ)
        else:
            if rehearse is not None:
                raise ConfigError(
                    "--rehearse works on one machine, not in a step of srun. In the batch script, before srun, write: "
                    "tpwrap --nproc-per-node 2 --rehearse=only COMMAND"
                )
            code = run_slurm(settings, task, recognised, os.environ)
    except ConfigError as e:
        click.echo(f"tpwrap: {e}", err=True)
        code = USAGE
    sys.exit(code)


@click.group(context_settings=_HELP)
@click.version_option(tpwrap.__version__, prog_name="torchpass")
def operate() -> None:
    """Look at runs of tpwrap."""


@operate.command()
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True, file_okay=False))
def events(run_dir: Path) -> None:
    """Tell the story of the run in RUN_DIR."""
    from tpwrap.report.table import show

    try:
        show(run_dir)
    except (OSError, ValueError) as e:
        click.echo(f"torchpass: {e}", err=True)
        sys.exit(USAGE)


@operate.command()
def doctor() -> None:
    """Say what of TorchPass works on this host or, run by srun, in this job, and what to do about the rest.

    Exit code 0: nothing is broken (there may be warnings). 1: something is.
    """
    from rich.console import Console
    from rich.table import Table

    from tpwrap.slurm.doctor import judge, look

    colour = {"ok": "green", "warning": "yellow", "error": "red"}
    table = Table("", "what", "found", "what to do", box=None)
    findings = judge(look(os.environ))
    for one in findings:
        table.add_row(f"[{colour[one.level]}]{one.level}[/]", one.what, one.found, one.fix)
    Console(highlight=False).print(table)
    sys.exit(any(one.level == "error" for one in findings))


@operate.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
def compare(a: Path, b: Path) -> None:
    """Did two runs compute the same, bit for bit? A and B are result directories of the examples.

    Exit code 0: they did. 1: the first difference is shown. 2: a directory is incomplete.
    """
    from tpwrap.report import compare as comparison

    try:
        first, second = comparison.read(a), comparison.read(b)
    except comparison.ResultError as e:
        click.echo(f"torchpass: {e}", err=True)
        sys.exit(USAGE)
    difference = comparison.first_difference(first, second)
    if difference is not None:
        click.echo(f"different: {difference}")
        sys.exit(1)
    click.echo(f"equal: {len(first.steps)} ranks, {first.last_step()} steps, and the final state")


def main() -> None:
    """Entry point of `tpwrap`."""
    run.main(prog_name="tpwrap")


def operator() -> None:
    """Entry point of `torchpass`."""
    operate.main(prog_name="torchpass")

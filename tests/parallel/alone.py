"""Some rows of the table without tpwrap: `python -m tests.parallel.alone DIRECTORY`.

Ranks are forked from here, with the environment that torchrun gives them, so that torch is imported once.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

from tests.parallel import facts, pairwise, table, train


def main(directory: Path) -> int:
    configurations = {table.slug(c): c for c in (table.Case(0, row).configuration for row in table.PLAIN)}
    return max(ran(configuration, directory / name) for name, configuration in configurations.items())


def ran(configuration: pairwise.Row, out: Path) -> int:
    """The greatest exit code of its ranks."""
    ranks = facts.KINDS[configuration["kind"]].ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    pids = [os.fork() or _rank(rank, ranks, port, configuration, out) for rank in range(ranks)]
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def _rank(rank: int, ranks: int, port: int, configuration: pairwise.Row, out: Path) -> int:
    """In the child; does not return."""
    numbers = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    code = 1
    try:
        train.main([*table.arguments(configuration), "--out", str(out)])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""How a request grows: sizes.c and sizes.lua as one table, then sizes.c as laws over arbitrary requests."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.slurm_plugin.building import HERE, PLUGIN, build

Answer = dict[str, object] | str
Enlarge = Callable[[str], Answer]


@contextmanager
def asking(*command: str | Path) -> Iterator[Enlarge]:
    """A process that answers one request a line."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(words: str) -> Answer:
            process.stdin.write(words + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            line = process.stdout.readline().strip()  # type: ignore[union-attr]
            assert line, f"the program ended at: {words}"
            return json.loads(line) if line.startswith("{") else line

        yield ask
        process.stdin.close()
        assert process.wait() == 0


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Enlarge]:
    program = build(tmp_path_factory.mktemp("sizes") / "sizes", PLUGIN / "sizes.c", HERE / "sizes_table.c")
    with asking(program) as ask:
        yield ask


@pytest.fixture(scope="module", params=["C", "lua5.3", "luajit"])
def enlarge(
    request: pytest.FixtureRequest, in_c: Enlarge, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Enlarge]:
    """sizes.c, and sizes.lua under the oldest and a newer Lua that Slurm is built with."""
    if request.param == "C":
        yield in_c
        return
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} here")
    script = tmp_path_factory.mktemp("sizes") / "sizes.lua"
    script.write_text((PLUGIN / "lua/sizes.lua").read_text() + (HERE / "sizes_table.lua").read_text())
    with asking(request.param, script) as ask:
        yield ask


N4 = "nodes_given=1 min_nodes=4 max_nodes=4"
N2_3 = "nodes_given=1 min_nodes=2 max_nodes=3"
BIG = 2**31 - 1

ENLARGED = [
    # the user's options as Slurm reads them           nodes  tasks  tasks-per-node  gpus  gpus-per-node
    ("nothing at all", "", (2, 2, 0, 0, "", "")),
    ("-N4", N4, (5, 5, 0, 0, "", "")),
    ("-N4 and 64 spares", f"spares=64 {N4}", (68, 68, 0, 0, "", "")),
    ("-N1", "nodes_given=1 min_nodes=1 max_nodes=1", (2, 2, 0, 0, "", "")),
    ("-N4 in srun", f"{N4} step=1", (5, 5, 0, 0, "", "")),
    ("-N2-3", f"spares=2 {N2_3}", (4, 5, 0, 0, "", "")),
    ("-N4 --ntasks-per-node=2", f"{N4} tasks_per_node=2 tasks=8 tasks_sent=1", (5, 5, 10, 0, "", "")),
    ("the same, tasks not counted", f"{N4} tasks_per_node=2 tasks=8", (5, 5, 0, 0, "", "")),
    ("-N2-3 --ntasks-per-node=2 in salloc", f"{N2_3} tasks_per_node=2 tasks=4 tasks_sent=1", (3, 4, 6, 0, "", "")),
    ("-N2-3 --ntasks-per-node=2 in sbatch", f"{N2_3} tasks_per_node=2 tasks=1", (3, 4, 0, 0, "", "")),
    ("-N4 -n4", f"{N4} tasks_given=1 tasks_sent=1 tasks=4", (5, 5, 5, 1, "", "")),
    ("-N4 -n8", f"spares=2 {N4} tasks_given=1 tasks_sent=1 tasks=8", (6, 6, 12, 2, "", "")),
    ("-N4 -n8 --ntasks-per-node=2", f"{N4} tasks_given=1 tasks_sent=1 tasks=8 tasks_per_node=2", (5, 5, 10, 0, "", "")),
    ("-n8 --ntasks-per-node=4", "spares=2 tasks_given=1 tasks_sent=1 tasks=8 tasks_per_node=4", (4, 4, 16, 0, "", "")),
    ("-n1", "tasks_given=1 tasks_sent=1 tasks=1", (2, 2, 2, 1, "", "")),
    ("-N4 -B 2:4:1, which counts tasks", f"{N4} tasks_sent=1 tasks=32", (5, 5, 40, 0, "", "")),
    ("-w n[1-3]", "nodes_given=1 min_nodes=3 max_nodes=0", (4, 4, 0, 0, "", "")),
    ("-N4 --gpus=8", f"spares=2 {N4} gpus=8", (6, 6, 0, 0, "12", "2")),
    ("-N4 --gpus=a100:8", f"{N4} gpus=a100:8", (5, 5, 0, 0, "a100:10", "a100:2")),
    ("-N4 --gpus=8 --gpus-per-node=2", f"{N4} gpus=8 gpus_placed=1", (5, 5, 0, 0, "10", "")),
    ("--gpus=1", "gpus=1", (2, 2, 0, 0, "2", "1")),
    ("-N4 --gpus=8 --ntasks-per-gpu=1", f"{N4} gpus=8 tasks_per_gpu=1", (5, 5, 0, 0, "10", "2")),
    ("-N4 --segment=2", f"spares=2 {N4} segment=2", (6, 6, 0, 0, "", "")),
    ("-N4 --segment=8, all in one", f"{N4} segment=8", (5, 5, 0, 0, "", "")),
    ("all that Slurm counts", f"nodes_given=1 min_nodes={BIG - 1} max_nodes={BIG - 1}", (BIG, BIG, 0, 0, "", "")),
]

REFUSED = [
    ("-n8 alone", "tasks_given=1 tasks_sent=1 tasks=8", "-n 8 alone does not say how many nodes train; write -N NODES"),
    ("--gpus=8 alone", "gpus=8", "--gpus=8 alone does not say how many nodes train; write -N NODES --gpus-per-node="),
    ("-n9 --ntasks-per-node=4", "tasks_given=1 tasks=9 tasks_per_node=4", "-n 9 does not fill its last node"),
    ("-N4 -n6", f"{N4} tasks_given=1 tasks=6", "-n 6 is not a multiple of the 4 nodes that train; write --ntasks"),
    ("-N4 -n0", f"{N4} tasks_given=1 tasks=0", "-n 0 is not a multiple"),
    ("-N4 -n3", f"{N4} tasks_given=1 tasks=3", "-n 3 is not a multiple"),
    ("-N4 -n8 --ntasks-per-node=4", f"{N4} tasks_given=1 tasks=8 tasks_per_node=4", "is 2 tasks a node, but --ntasks"),
    ("a count of Slurm's own", f"{N4} tasks_sent=1 tasks=6", "-n 6 is not a multiple"),
    ("-N2-3 -n6", f"{N2_3} tasks_given=1 tasks=6", "-n 6 with a range of nodes leaves the tasks of a node open; "),
    ("-N4 -n8 --ntasks-per-gpu=1", f"{N4} tasks_given=1 tasks=8 tasks_per_gpu=1", "counts tasks twice; write -N 4 --"),
    ("-N4 --gpus=6", f"{N4} gpus=6", "--gpus=6 is not a multiple of the 4 nodes that train; write --gpus-per-node="),
    ("-N4 --gpus=2", f"{N4} gpus=2", "--gpus=2 is not a multiple"),
    ("-N2-3 --gpus=6", f"{N2_3} gpus=6", "--gpus=6 with a range of nodes leaves the GPUs of a node open; write --gpu"),
    ("--gpus of two types", f"{N4} gpus=a100:4,h100:4", "--gpus=a100:4,h100:4 is not one number of GPUs; write --gpu"),
    ("--gpus=2k", f"{N4} gpus=2k", "--gpus=2k is not one number of GPUs"),
    ("--gpus=0", f"{N4} gpus=0", "is not one number of GPUs"),
    ("--gpus=-4", f"{N4} gpus=-4", "is not one number of GPUs"),
    ("--gpus=a100:", f"{N4} gpus=a100:", "is not one number of GPUs"),
    ("--gpus of a long type", f"{N4} gpus={'x' * 300}:8", "is not one number of GPUs"),
    ("--gpus larger than any number", f"{N4} gpus={'9' * 40}", "is not one number of GPUs"),
    ("-N4 --segment=4", f"spares=2 {N4} segment=4", "4 nodes and 2 spares are not whole segments of 4 nodes; writ"),
    ("... and the number that fits", f"spares=2 {N4} segment=4", "--torchpass-spares=4, or leave --segment away"),
    ("a range that ends badly", f"spares=2 {N2_3} segment=4", "are not whole segments"),
    ("-N2-3 in srun", f"{N2_3} step=1", "srun lays its tasks out for one number of nodes; write -N 2, or use sbatch"),
    ("-N 4,8", f"{N4} size_list=1", "-N with a list of node counts cannot be enlarged; write one number or MIN-MAX"),
    ("--distribution=arbitrary", f"{N4} arbitrary=1", "--distribution=arbitrary places every task by hand"),
    ("-N0", "nodes_given=1 min_nodes=0 max_nodes=0", "there is no training node in -N 0-0; write -N 1 or more"),
    ("-N5-3", "nodes_given=1 min_nodes=5 max_nodes=3", "there is no training node in -N 5-3"),
    ("-N-1", "nodes_given=1 min_nodes=-1 max_nodes=-1", "there is no training node"),
    ("no spares", f"spares=0 {N4}", "0 is no number of spare nodes; write 1 or more"),
    ("negative spares", f"spares=-1 {N4}", "-1 is no number of spare nodes"),
    ("endless spares", f"spares={2**62} {N4}", "is no number of spare nodes"),
    ("too many nodes", f"nodes_given=1 min_nodes={BIG} max_nodes={BIG}", "more nodes than Slurm can count"),
    ("a range too far", f"nodes_given=1 min_nodes=1 max_nodes={BIG}", "more nodes than Slurm can count"),
    ("too many spares", f"spares={BIG} {N4}", "more nodes than Slurm can count"),
    ("too many tasks", f"spares=4 {N4} tasks_given=1 tasks={2**30}", "more tasks than Slurm can count; write smaller"),
    ("tasks past any number", f"spares={2**30} {N4} tasks_given=1 tasks={2**62}", "more tasks than Slurm can count"),
    ("too many GPUs", f"spares=4 {N4} gpus={2**30}", "more GPUs than Slurm can count; write smaller numbers"),
]


@pytest.mark.parametrize(("asked", "expected"), [pytest.param(words, to, id=name) for name, words, to in ENLARGED])
def test_enlarged(enlarge: Enlarge, asked: str, expected: tuple[object, ...]) -> None:
    answer = enlarge(asked)
    assert isinstance(answer, dict), answer
    assert tuple(answer.values()) == expected


@pytest.mark.parametrize(("asked", "sentence"), [pytest.param(words, text, id=name) for name, words, text in REFUSED])
def test_refused(enlarge: Enlarge, asked: str, sentence: str) -> None:
    answer = enlarge(asked)
    assert isinstance(answer, str), answer
    assert sentence in answer
    assert "\n" not in answer
    assert len(answer) < 300


numbers = st.one_of(st.integers(0, 12), st.integers(-2, 2**31), st.integers(-(2**63), 2**63 - 1))
requests = st.fixed_dictionaries(
    {"nodes_given": st.integers(0, 1), "min_nodes": numbers, "spares": st.one_of(st.integers(1, 4), numbers)},
    optional={
        "max_nodes": numbers,
        "tasks_given": st.integers(0, 1),
        "tasks_sent": st.integers(0, 1),
        "tasks": numbers,
        "tasks_per_node": numbers,
        "tasks_per_gpu": st.integers(0, 1),
        "gpus": st.one_of(numbers.map(str), st.text("a:0123456789,k", min_size=1, max_size=60)),
        "gpus_placed": st.integers(0, 1),
        "segment": numbers,
    },
)


@settings(max_examples=400, deadline=None)
@given(asked=requests)
def test_laws(in_c: Enlarge, asked: dict[str, int | str]) -> None:
    """Whatever is accepted has the spares on top and every share as before; nothing makes the code stumble."""
    answer = in_c(" ".join(f"{name}={value}" for name, value in asked.items()))
    if isinstance(answer, str):
        assert answer
        return
    low, high, tasks = answer["min_nodes"], answer["max_nodes"], answer["tasks"]
    assert isinstance(low, int)
    assert isinstance(high, int)
    assert isinstance(tasks, int)
    spares = asked["spares"]
    assert isinstance(spares, int)
    training = low - spares
    assert spares >= 1
    assert 1 <= training <= high - spares
    assert high <= BIG
    if asked["nodes_given"]:
        assert training == asked["min_nodes"]
    if asked.get("tasks_given"):
        assert tasks * training == int(asked.get("tasks", 1)) * low
        assert low == high
    if answer["gpus"]:
        total = int(str(answer["gpus"]).rpartition(":")[2])
        assert total * training == int(str(asked["gpus"]).rpartition(":")[2]) * low
    for count in (low, high):
        segment = int(asked.get("segment", 0))
        assert segment <= 0 or count <= segment or count % segment == 0

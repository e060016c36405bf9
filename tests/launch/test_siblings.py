from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from tpwrap.launch.siblings import Door, Place, all_devices, cpus_by_slot

HOLD = "import sys; from pathlib import Path; from tpwrap.launch.siblings import Place, hold; "
HOLD += "sys.exit(hold(Path(sys.argv[1]), Place(int(sys.argv[2]), [3], 'x'), float(sys.argv[3])))"


def test_siblings_end_with_the_first_tasks_code(tmp_path: Path) -> None:
    async def main() -> None:
        door = Door(tmp_path / "tasks")
        tasks = [
            subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "tasks"), str(n), "30"]) for n in (1, 2)
        ]
        places = await door.places(2, 30)
        assert sorted(place.local_id for place in places) == [1, 2]
        assert places[0].cpus == [3]
        tasks[0].terminate()  # as Slurm does when it ends a job: the first task decides
        await asyncio.sleep(0.2)
        assert [task.poll() for task in tasks] == [None, None]
        await door.close(143)
        assert [task.wait(10) for task in tasks] == [143, 143]

    asyncio.run(main())


def test_a_node_without_its_first_task(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HOLD, str(tmp_path / "tasks"), "1", "0.2"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "has not started" in ended.stderr


def test_the_first_task_dies(tmp_path: Path) -> None:
    async def main() -> int:
        task = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "tasks"), "1", "30"])

        async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert json.loads(await reader.readline())["local_id"] == 1
            writer.close()

        server = await asyncio.start_unix_server(enter, tmp_path / "tasks")
        async with server:
            return await asyncio.to_thread(task.wait, 10)

    assert asyncio.run(main()) == 1


def test_not_all_siblings_come(tmp_path: Path) -> None:
    async def main() -> int:
        door = Door(tmp_path / "tasks")
        found = await door.places(2, 0.2)
        await door.close(0)
        return len(found)

    assert asyncio.run(main()) == 0


def place(local_id: int, cpus: list[int], devices: str | None = None) -> Place:
    return Place(local_id, cpus, devices)


def test_processors() -> None:
    assert cpus_by_slot([place(0, [0, 1]), place(1, [0, 1])]) == []
    assert cpus_by_slot([place(1, [2, 3]), place(0, [0, 1])]) == [[0, 1], [2, 3]]


def test_devices() -> None:
    assert all_devices([place(1, [], "1"), place(0, [], "0")]) == "0,1"
    assert all_devices([place(0, [], "0,1"), place(1, [], "0,1")]) is None
    assert all_devices([place(0, [], None), place(1, [], None)]) is None
    # In a device cgroup of its own each task counts from 0; nobody can see the devices of the others.
    assert all_devices([place(0, [], "0"), place(1, [], "0"), place(2, [], "1")]) is None

"""Where Slurm's option table is not what the plugin knows, it says so and touches nothing."""

import subprocess
from pathlib import Path

import pytest

from tests.slurm_plugin.building import FLAGS, HERE, PLUGIN

FUNCTIONS = ["slurm_option_get", "slurm_option_isset", "slurm_option_set", "slurm_process_option"]
FUNCTIONS.append("slurm_opt_create_job_desc")


def find_table(folder: Path, definitions: str, *, in_library: bool) -> str:
    """What option.c says in a program, or a program with a library, that has these definitions."""
    (folder / "there.c").write_text(definitions)
    sources: list[str | Path] = [PLUGIN / "option.c", HERE / "find_table.c"]
    if in_library:
        library = folder / "libthere.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "there.c"], check=True)
        sources += ["-Wl,--no-as-needed", library, f"-Wl,-rpath,{folder}"]
    else:
        sources += [folder / "there.c"]
    program = folder / "find_table"
    subprocess.run(["cc", *FLAGS, "-rdynamic", "-o", program, *sources, "-ldl"], check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.strip()


def functions(*names: str) -> str:
    return "".join(f"int {name}(void);\nint {name}(void) {{ return 0; }}\n" for name in names)


@pytest.fixture(autouse=True)
def _slurm_headers() -> None:
    if not Path("/usr/include/slurm/slurm.h").exists():
        pytest.skip("needs Slurm's headers (libslurm-dev)")


def test_all_there(tmp_path: Path) -> None:
    assert find_table(tmp_path, "int opt;\n" + functions(*FUNCTIONS), in_library=False) == "found"


@pytest.mark.parametrize("missing", ["opt", *FUNCTIONS])
def test_one_missing(tmp_path: Path, missing: str) -> None:
    table = "" if missing == "opt" else "int opt;\n"
    said = find_table(tmp_path, table + functions(*(name for name in FUNCTIONS if name != missing)), in_library=False)
    assert said.startswith("this build of Slurm hides its option table, so the plugin cannot add the spares")
    assert "enlarge=cli_filter" in said


def test_somebody_elses_opt(tmp_path: Path) -> None:
    """`opt` is a common name. One that a library exports is not the command's."""
    said = find_table(tmp_path, "int opt;\n" + functions(*FUNCTIONS), in_library=True)
    assert said.startswith("this build of Slurm hides its option table")

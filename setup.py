"""Builds the one compiled part, `tpwrap.engine._native`, against the installed torch.

Everything else about the package stands in pyproject.toml. With TPWRAP_NATIVE=0 it is left out; `make setup`
does so when it installs the rest, and builds it in place, where it can be rebuilt file by file.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

HERE = Path(__file__).parent
SOURCES = sorted(str(p.relative_to(HERE)) for p in (HERE / "tpwrap/engine/native").glob("*.cpp"))
HEADERS = sorted(str(p.relative_to(HERE)) for p in (HERE / "tpwrap/engine/native").glob("*.hpp"))
BUILDS = {"build_ext", "develop", "install", "bdist_wheel", "editable_wheel"}


def native() -> dict[str, Any]:
    """The arguments of setup() for the extension; nothing where only metadata is asked for."""
    if os.environ.get("TPWRAP_NATIVE") == "0" or not BUILDS.intersection(sys.argv):
        return {}
    try:
        from torch.utils import cpp_extension
    except ImportError:
        raise SystemExit(
            "tpwrap: torch is not importable here. Install it first (pip install 'torch>=2.10'), then "
            "build with: pip install --no-build-isolation ."
        ) from None
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        raise SystemExit(
            f"tpwrap: no C++ compiler ({compiler}). On Debian or Ubuntu: apt-get install g++ python3-dev"
        )
    # torch adds the language standard its headers need; -g0 keeps the build small and quick.
    extension = cpp_extension.CppExtension(
        "tpwrap.engine._native",
        SOURCES,
        depends=HEADERS,
        extra_compile_args=["-O2", "-g0"],
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": cpp_extension.BuildExtension}}


setup(**native())

#!/usr/bin/env bash
# Makes .venv with everything that make's other targets need; quick when nothing has changed since.
# On Debian and Ubuntu it installs missing system packages when run as root, and names them otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}
say() { printf 'setup: %s\n' "$*" >&2; }

# --- is there anything to do? -----------------------------------------------------------------------
packages=$(cat pyproject.toml setup.py tools/setup.sh | sha256sum)
native=$(cat tpwrap/engine/native/*.[ch]pp setup.py | sha256sum)
packages_stamp=$venv/.packages-$(printf '%s' "$packages $torch" | sha256sum | cut -c1-16)
native_stamp=$venv/.native-$(printf '%s' "$native $torch" | sha256sum | cut -c1-16)
[ -e "$packages_stamp" ] && [ -e "$native_stamp" ] && exit 0

# --- what the system must have ----------------------------------------------------------------------
missing=()
command -v g++ >/dev/null || missing+=(g++)
if ! command -v "$python" >/dev/null; then
    missing+=(python3 python3-dev python3-venv)
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
    [ -e "$header" ] || missing+=(python3-dev)
fi
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing ${missing[*]}"
        apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q "${missing[@]}"
    else
        say "missing: ${missing[*]}. On Debian or Ubuntu: sudo apt-get install ${missing[*]}"
        exit 1
    fi
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    say "$("$python" --version) is too old, 3.10 is needed; name another one: make setup PYTHON=python3.12"
    exit 1
fi

# --- packages ---------------------------------------------------------------------------------------
[ -x $venv/bin/python ] || "$python" -m venv $venv
pip() { $venv/bin/python -m pip --disable-pip-version-check "$@"; }
if [ ! -e "$packages_stamp" ]; then
    say "installing $torch and the other packages into $venv (a few minutes the first time)"
    # torch first, and pinned: our C++ part is compiled against it, and nothing else may pull another build. TORCH_INDEX
    # names a further package index, for instance the one with PyTorch's builds without CUDA (a tenth of the size).
    index=()
    [ -z "${TORCH_INDEX-}" ] || index=(--extra-index-url "$TORCH_INDEX")
    pip install -q "$torch" "${index[@]}"
    pip install -q 'setuptools>=77' wheel ninja numpy
    TPWRAP_NATIVE=0 pip install -q --no-build-isolation -e '.[dev,frameworks]'
    rm -f $venv/.packages-*
    touch "$packages_stamp"
fi

# --- the C++ part -----------------------------------------------------------------------------------
if [ ! -e "$native_stamp" ]; then
    say "building the engine's C++ part against $($venv/bin/python -c 'import torch; print(torch.__version__)')"
    mkdir -p build
    if ! $venv/bin/python setup.py -q build_ext --inplace >build/native.log 2>&1; then
        tail -n 30 build/native.log >&2
        say "the build of the C++ part failed; all of it: build/native.log"
        exit 1
    fi
    rm -f $venv/.native-*
    touch "$native_stamp"
fi

#!/bin/bash
# What people submit: a few settings, then one call of Python.
set -euo pipefail
OUT=${1:-out}
EXTRA="--lr 0.02 --bptt 10"
export TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"
exec python "$(dirname "$0")/started_by_shell.py" --output-dir "$OUT" $EXTRA

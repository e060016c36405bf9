#!/bin/bash
# How many start their training: some environment, then the program in place of the shell.
set -e
cd "$(dirname "$0")"
export VARIANT_STARTED_BY=bash
exec python variants.py "$@"

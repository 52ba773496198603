#!/usr/bin/env bash
# Lint, types and tests, in an environment of their own.  More arguments go to pytest:
#   bash scripts/test.sh -m slow
set -euo pipefail
source "$(dirname "$0")/environment.sh" dev

ruff format --check .
ruff check .
mypy
# One thread for each test process: two pools of two on two cores are many times slower.
OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python -m pytest -n "${MINILLAMA_TEST_PROCESSES:-2}" "$@"

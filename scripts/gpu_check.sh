#!/usr/bin/env bash
# What only a GPU can show, in under ten minutes: the norms' numbers and speed there, training steps, DDP and FSDP on
# every GPU, resuming to the bit, an ablation with several cells at once.  Prints a table and writes gpu_check.json.
# Without a GPU the same runs on the CPU with small shapes.
set -euo pipefail
source "$(dirname "$0")/environment.sh" bench

# cuBLAS needs it to give the same bits every time.
export CUBLAS_WORKSPACE_CONFIG=:4096:8
minillama bench gpu --json "${1:-gpu_check.json}"

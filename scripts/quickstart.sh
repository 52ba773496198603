#!/usr/bin/env bash
# From nothing to a trained model, text that it wrote, and a picture that compares two norms.
# Needs Python 3.11 to 3.13, and a network for the installation alone; about two minutes after it.
set -euo pipefail
source "$(dirname "$0")/environment.sh" report

runs=runs/quickstart
echo "1/3  Training a small RMSNorm Llama on the prose that ships with Python"
minillama train configs/tiny.yaml name=tiny out_dir="$runs/tiny" --overwrite

echo
echo "2/3  Letting it write"
minillama generate "$runs/tiny" --prompt "If the " --seed 1 --max-new-tokens 100

echo
echo "3/3  Training the same model with RMSNorm and LayerNorm at three learning rates each"
minillama ablate configs/ablations/quick.yaml out_dir="$runs/norms"

echo
echo "Look at $runs/norms/report.html and $runs/norms/report.png"

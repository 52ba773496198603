#!/usr/bin/env bash
# From nothing to a trained model, generated text, and a picture that compares two norms.
# Needs Python 3.11 to 3.13, and a network to install only; then about two minutes.
set -euo pipefail
source "$(dirname "$0")/environment.sh" report

runs=runs/quickstart
echo "1/3  Training a small RMSNorm Llama on the prose that ships with Python"
minillama train tiny name=tiny out_dir="$runs/tiny" --overwrite

echo
echo "2/3  Generating text"
minillama generate "$runs/tiny" --prompt "If the " --seed 1 --max-new-tokens 100

echo
echo "3/3  Training the same model with RMSNorm and LayerNorm at three learning rates each"
minillama ablate quick out_dir="$runs/norms"

echo
echo "Look at $runs/norms/report.html and $runs/norms/report.png"

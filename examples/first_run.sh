#!/usr/bin/env bash
# Ask, plan, train: the three questions on a model small enough for a laptop. About a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p runs
folder=$(mktemp -d runs/first-XXXXXX)

echo "1. Will it fit?"
shardplan fit llama-3-8b 8xA100-80GB --seq-len 8192
echo
echo "2. What is the best plan for a small Llama on four processes of this machine?"
shardplan plan examples/tiny-llama here:4 --seq-len 128 --global-batch-size 16 \
    --fix tp=2 --top 5 -o "$folder/plan.json"
echo
echo "3. Run it, then hold the prediction against the measurement."
shardplan run "$folder/plan.json" --data examples/corpus.txt --steps 40 --output "$folder/run"
echo
echo "The same plan in float64 against a single process:"
shardplan run "$folder/plan.json" --verify

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh checkout to a fine-tuned model on a CPU: installs into .venv, makes the data from the packages that are
# installed there, trains configs/quickstart.yaml in two processes, and shows retrieval before and after.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
install_into_venv cpu,plot
use_all_of_the_cpu

OUT=output/quickstart
EVAL="--queries data/code_search/eval/queries.jsonl --corpus data/code_search/eval/corpus.jsonl --qrels data/code_search/eval/qrels.tsv --max_query_len 64 --max_passage_len 64"
export PYTHONUNBUFFERED=1  # the launcher would keep the log to itself for minutes where stdout is no terminal
SECONDS=0

echo "== Model and data"
python scripts/get_minilm.py data/all-MiniLM-L6-v2
[ -f data/code_search/counts.json ] || python scripts/make_code_search.py --output_dir data/code_search | tail -n 1

echo "== Before: all-MiniLM-L6-v2 as it is"
rm -rf "$OUT"
mkdir -p "$OUT"
OMP_NUM_THREADS=2 paddle-infcl evaluate --model data/all-MiniLM-L6-v2 $EVAL --output "$OUT/before.json" 2>"$OUT/before.log" \
  || { tail -n 30 "$OUT/before.log"; exit 1; }

echo "== Training (the log of the second process is in $OUT/log)"
python -m paddle.distributed.launch --nproc_per_node 2 --log_level WARNING --log_dir "$OUT/log" scripts/run_embedding.py configs/quickstart.yaml

echo "== After: encoded and scored again, from the saved model"
OMP_NUM_THREADS=2 paddle-infcl evaluate --model "$OUT" $EVAL --output "$OUT/after.json" 2>"$OUT/after.log" \
  || { tail -n 30 "$OUT/after.log"; exit 1; }

python scripts/quickstart_report.py "$OUT"
echo "$((SECONDS / 60)) min $((SECONDS % 60)) s after installation. The model is in $OUT."

#!/usr/bin/env bash
# From raw text to a Hugging Face encoder with a report, on a laptop's CPU: CLM, then MLM, by Megatron-Core under
# tensor parallelism 2. At most six minutes on two cores once installed; SHORT=1 takes at most ninety seconds.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tools/setup_env.sh
python=${MLMCLM_VENV:-.venv}/bin/python
export PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1

here=examples/quickstart
work=$here/output
overrides=()
# Fewer steps in each phase, and the schedule with them.
[[ -z ${SHORT:-} ]] || overrides=(
    phases.0.steps=20 phases.1.steps=40 optimizer.warmup_steps=8 optimizer.decay_steps=20
    validation.interval=60 validation.samples=16 log_interval=10
)

mlmclm() { "$python" -m megatron_mlmclm.cli "$@"; }
step() { echo; echo "== $*"; }

rm -rf "$work"

step "1/6 real text: State of the Union addresses"
"$python" $here/prepare.py $work

step "2/6 tokenizer"
mlmclm tokenizer train $work/train.jsonl --vocab-size 4096 --output $work/tokenizer

step "3/6 text to Megatron's indexed data"
mlmclm preprocess $work/train.jsonl --tokenizer $work/tokenizer --output $work/train
mlmclm preprocess $work/valid.jsonl --tokenizer $work/tokenizer --output $work/valid
mlmclm inspect $work/valid

step "4/6 pretraining: CLM, then MLM, tensor parallel on 2 processes"
mlmclm train $here/recipe.yaml --nproc 2 "${overrides[@]}"

step "5/6 the encoder in Hugging Face form, and the masks it fills"
mlmclm export-hf $work/run --output $work/encoder
mlmclm fill-mask $work/encoder --data $work/valid --train-data $work/train --samples 256 \
    --sentences $work/sentences.txt --output $work/fill-mask.json

step "6/6 report"
mlmclm report $work/run --fill-mask $work/fill-mask.json --output $work/report.html

echo
echo "encoder: $work/encoder"
echo "report: $work/report.html"
"$python" - $work/fill-mask.json <<'PY'
import json
import sys

found = json.load(open(sys.argv[1], encoding="utf-8"))
for key in ("mlm_loss", "unigram_loss", "mask_top1", "unigram_top1"):
    print(f"{key}: {found[key]:.4f}")
PY

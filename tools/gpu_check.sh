#!/usr/bin/env bash
# Checks the GPU path on a machine with one CUDA GPU, torch and megatron-core (no Transformer Engine needed), in under
# four minutes:
#
#   tools/gpu_check.sh [OUTPUT.json]     the table is printed; the figures go to OUTPUT.json (gpu_check.json)
#   tools/gpu_check.sh --rehearse        the same steps on a CPU with tiny shapes: shows that the script itself works
#
# Uses $PYTHON, or .venv where it is, or python3.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
[[ -n $python ]] || { [[ -x $ROOT/.venv/bin/python ]] && python=$ROOT/.venv/bin/python || python=python3; }
PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONWARNINGS=ignore exec "$python" "$ROOT/tools/gpu_check.py" "$@"

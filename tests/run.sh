#!/usr/bin/env bash
# Checks everything: lint, formatting, tests. Works from any folder and in a fresh clone; makes its environment.
#
#   tests/run.sh                    all tests, the slow ones too
#   tests/run.sh -m "not slow" -x   arguments go to pytest (paths count from the repository root)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup_env.sh
VENV=${MLMCLM_VENV:-.venv}
python=$VENV/bin/python

"$python" -m ruff check .
"$python" -m ruff format --check .
exec "$python" -m pytest "$@"

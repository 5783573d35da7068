#!/usr/bin/env bash
# Makes the Python environment: .venv in the repository root (or $MLMCLM_VENV), with this package editable in it.
#
#   tools/setup_env.sh [EXTRAS]      EXTRAS: a comma-separated list from setup.py (or $EXTRAS), "dev" if not given
#
# $PYTHON names the interpreter to build with; else the first Python >= 3.12 found is taken. Safe to run at any time:
# nothing is done when setup.py, the Python version and the extras are those of the last run, and an environment left
# half-built is built again. Exit status 2, with one line on stderr that says what is missing, when it can't be made.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
EXTRAS=${1:-${EXTRAS:-dev}}
VENV=${MLMCLM_VENV:-$ROOT/.venv}
[[ $VENV == /* ]] || VENV=$ROOT/$VENV    # relative: to the repository root, as in tests/run.sh
STAMP=$VENV/mlmclm-stamp          # written last; its absence means "cut off while packages were written"
LOG=$VENV/mlmclm-pip.log
NEEDED_KB=$((7 * 1024 * 1024))    # torch's CUDA libraries are most of it

fail() {
    echo "setup_env: error: $*" >&2
    exit 2
}

say() { echo "setup_env: $*"; }

shown() { echo "${1#"$ROOT"/}"; }

# Whether $1 runs and is new enough. It is really run: a pyenv shim may be on PATH and still refuse.
is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 </dev/null
}

can_make_venvs() {
    "$1" -c 'import venv, ensurepip' >/dev/null 2>&1 </dev/null
}

# Every interpreter worth trying, best first, one a line.
candidates() {
    [[ -z ${PYTHON:-} ]] || type -aP "$PYTHON" || true
    type -aP python3.12 python3.13 python3.14 python3 || true
    local root
    for root in "$(pyenv root 2>/dev/null || true)" "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        # Lowest version first: the oldest supported Python is the one the tests ran on.
        [[ -z $root ]] || printf '%s\n' "$root"/versions/*/bin/python3 | sort -V
    done
}

# Prints the interpreter to build with; fails in one line when there is none.
find_python() {
    local python without_venv=""
    if [[ -n ${PYTHON:-} ]] && ! is_new_enough "$PYTHON"; then
        say "PYTHON=$PYTHON does not run or is older than 3.12; looking for another" >&2
    fi
    while read -r python; do
        is_new_enough "$python" || continue
        if can_make_venvs "$python"; then
            echo "$python"
            return
        fi
        without_venv=${without_venv:-$python}
    done < <(candidates)
    [[ -z $without_venv ]] || fail "$without_venv has no venv/ensurepip module:" \
        "install it (Debian, Ubuntu: apt-get install python3-venv, or python3.12-venv for that version)"
    fail "no Python 3.12 or newer found (tried \$PYTHON, python3.12 to python3.14 and python3 on PATH, pyenv's versions):" \
        "install one, or name it: PYTHON=/path/to/python3.12 tools/setup_env.sh"
}

# What the environment was made from. Its root counts too: the editable install points there.
fingerprint() {
    { cat "$ROOT/setup.py"; echo "$ROOT"; echo "$EXTRAS"; "$VENV/bin/python" -V; } 2>/dev/null | sha256sum
}

# "Python 3.12.1, torch 2.14.1, megatron-core 0.19.2" from metadata (importing torch takes seconds); fails if one is gone.
versions() {
    "$VENV/bin/python" - 2>/dev/null <<'PY'
import platform
from importlib.metadata import version

version("megatron_mlmclm")
print(f"Python {platform.python_version()}, torch {version('torch')}, megatron-core {version('megatron-core')}")
PY
}

# Whether the environment is whole, of this setup.py and these extras, and of the Python that $PYTHON asks for.
up_to_date() {
    [[ -f $STAMP && $(cat "$STAMP") == "$(fingerprint)" ]] || return 1
    if [[ -n ${PYTHON:-} ]] && is_new_enough "$PYTHON"; then
        [[ $("$PYTHON" -V) == $("$VENV/bin/python" -V) ]] || return 1
    fi
    SUMMARY=$(versions)
}

finish() {
    echo "environment: $(shown "$VENV") ($SUMMARY)"
    exit 0
}

check_room() {
    local free_kb
    free_kb=$(df -Pk "$(dirname "$VENV")" | awk 'NR == 2 { print $4 }')
    ((free_kb >= NEEDED_KB)) || fail "no room on disk: $(dirname "$VENV") has $((free_kb / 1024)) MB free and the" \
        "environment needs about 7 GB: make room, or set MLMCLM_VENV to a path on a larger disk"
}

# A new, empty environment at $VENV, in place of whatever half-built one is there.
create_venv() {
    local python
    if [[ -e $VENV && ! -f $VENV/pyvenv.cfg && -n $(ls -A "$VENV") ]]; then
        fail "$VENV is there and is not a virtual environment: move it away, or set MLMCLM_VENV to another path"
    fi
    python=$(find_python)
    rm -rf "$VENV"
    check_room
    say "making $(shown "$VENV") with $("$python" -V) ($python)"
    "$python" -m venv "$VENV" >/dev/null || fail "$python -m venv $VENV failed (its lines are above)"
}

# Keep an environment that was finished once and runs; an interrupted pip leaves packages half-written, so build anew.
reusable() {
    [[ -f $STAMP ]] && is_new_enough "$VENV/bin/python" && versions >/dev/null || return 1
    [[ -z ${PYTHON:-} ]] || ! is_new_enough "$PYTHON" || [[ $("$PYTHON" -V) == $("$VENV/bin/python" -V) ]]
}

# A few lines from pip's many: the large downloads, and the step that follows them.
progress() {
    sed -nu -E \
        -e 's/^ *(Downloading|Using cached) (https?:.*\/)?([A-Za-z0-9_.]+)-[0-9][^ ]* \(([0-9.]+ GB|[0-9]{3,}(\.[0-9]+)? MB)\).*/setup_env:   \3 (\4)/p' \
        -e 's/^Installing collected packages:.*/setup_env:   unpacking/p'
}

install() {
    say "installing megatron_mlmclm[$EXTRAS] (pip's output: $(shown "$LOG"))"
    rm -f "$STAMP"
    if ! (cd "$ROOT" && "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input \
        --progress-bar off -e ".[$EXTRAS]" 2>&1) </dev/null | tee "$LOG" | progress; then
        # pip that failed before unpacking has changed nothing: a sound environment may be kept for the next try.
        grep -q "^Installing collected packages" "$LOG" || echo "to be updated" >"$STAMP"
        if grep -q "No space left on device" "$LOG"; then
            fail "no room on disk: pip filled $(dirname "$VENV") or its temporary folder ${TMPDIR:-/tmp}" \
                "(about 7 GB are needed): make room, or set MLMCLM_VENV or TMPDIR to a larger disk"
        fi
        tail -n 15 "$LOG" | sed 's/^/    /' >&2
        fail "pip could not install megatron_mlmclm[$EXTRAS]; its last lines are above, all of them in $LOG"
    fi
    echo "to be updated" >"$STAMP" # whole, though perhaps not what was asked for
    if grep -q "does not provide the extra" "$LOG"; then
        fail "cannot install the extras \"$EXTRAS\": setup.py $(grep -m1 -o "does not provide the extra.*" "$LOG"); see extras_require there"
    fi
}

main() {
    ! up_to_date || finish
    mkdir -p "$(dirname "$VENV")" || fail "cannot make $(dirname "$VENV"): set MLMCLM_VENV to a path you may write"
    # One set-up at a time: a second one waits here and then finds the work done. Locking the folder leaves no file.
    exec 9<"$(dirname "$VENV")"
    ! command -v flock >/dev/null || flock 9 || true
    ! up_to_date || finish
    reusable || create_venv
    install
    SUMMARY=$(versions) || fail "pip ended well but torch or megatron-core is not in $VENV; its output: $LOG"
    fingerprint >"$STAMP"
    finish
}

main

#!/usr/bin/env bash
# Makes .venv with everything that training and the tests need. A torch that the machine's own
# python already has is used and left alone; without one, torch 2.13.0 is installed first.
#   scripts/setup.sh [extra]      extra: speech (default) or dev
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-speech}
base=${PYTHON:-python3}

"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$base" --version) is too old; Python 3.11 or newer is needed: set PYTHON=/path/to/python3.11" >&2
    exit 2
}
if [[ ! -x .venv/bin/python ]]; then
    if "$base" -c 'import torch' 2>/dev/null; then
        "$base" -m venv --system-site-packages .venv
    else
        "$base" -m venv .venv
    fi
fi
python=.venv/bin/python
if ! "$python" -c 'import torch' 2>/dev/null; then
    "$python" -m pip install --quiet "torch==2.13.0"
fi
# Whatever torch is there now stays: the constraint makes pip fail rather than replace it.
torch=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
echo "torch==$torch" >"$constraint"
"$python" -m pip install --quiet --constraint "$constraint" --editable ".[$extra]"
echo "ready: torch $torch in .venv"

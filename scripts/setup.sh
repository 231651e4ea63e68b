#!/usr/bin/env bash
# Makes .venv with everything that training (or, with dev, the tests) needs. An existing .venv is kept, and
# a torch that it or PYTHON (python3) has is used and not replaced; otherwise torch 2.13.0 is installed.
#   scripts/setup.sh [extras]      for example: speech (default), speech,pretrained, dev
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-speech}
base=${PYTHON:-python3}

"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$base" --version) is too old; Python 3.11 or newer is needed: set PYTHON=/path/to/python3.11" >&2
    exit 2
}
python=.venv/bin/python
stamp=.venv/ready-$extra
if [[ -e $stamp ]] && cmp -s pyproject.toml "$stamp"; then
    exit 0
fi
if ! "$python" -m pip --version >/dev/null 2>&1; then
    rm -rf .venv # absent or incomplete
    if "$base" -c 'import torch' 2>/dev/null; then
        "$base" -m venv --system-site-packages .venv
        # If this Python is itself a virtual environment, its packages are added by their path.
        "$base" - "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'EOF'
import pathlib, sys, sysconfig
if sys.prefix != sys.base_prefix:
    pathlib.Path(sys.argv[1], "present_python.pth").write_text(sysconfig.get_path("purelib") + "\n")
EOF
    else
        "$base" -m venv .venv || {
            echo "error: $base cannot make a virtual environment; install its venv module (Debian: python3-venv) or set PYTHON" >&2
            exit 2
        }
    fi
fi
if ! "$python" -c 'import torch' 2>/dev/null; then
    "$python" -m pip install --quiet --no-compile "torch==2.13.0"
fi
# The constraint makes pip fail rather than replace the torch that is there.
torch=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
echo "torch==$torch" >"$constraint"
"$python" -m pip install --quiet --no-compile --constraint "$constraint" --editable ".[$extra]"
# Its weights judge voices (collect, finetune). Its requirements, which have no wheels, are not needed.
"$python" -m pip install --quiet --no-compile --no-deps resemblyzer==0.1.4
# pip would compile 14,000 files, most of which nothing imports. Python compiles what it imports, the first time;
# for the usual commands here, also where PYTHONDONTWRITEBYTECODE keeps later starts from doing it.
env --unset PYTHONDONTWRITEBYTECODE "$python" - <<'EOF'
import titan_tts.evaluate.evaluate, torchtitan.models.dit_tts.trainer
EOF
cp pyproject.toml "$stamp"
echo "ready: torch $torch in .venv"

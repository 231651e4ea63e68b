#!/usr/bin/env bash
# Checks and measures this code on one GPU in under ten minutes; see docs/speed.md.
#   scripts/gpu_check.sh [--groups A B] [--only NAME] [--minutes 9] [--flavors 800M 3B] [--out FILE] ...
#   scripts/gpu_check.sh --tiny                   all of it on a CPU at small sizes
# For a GPU machine without a network:
#   scripts/gpu_check.sh --collect-wheels DIR     elsewhere: fetches what such a machine lacks
#   scripts/gpu_check.sh --wheels DIR ...         there: uses them from a throw-away folder
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

[[ -x .venv/bin/python ]] && python=.venv/bin/python || python=python3
python=${PYTHON:-$python}

# What training needs beside torch, numpy, triton, transformers and the packages that come with them
# (tokenizers, huggingface-hub, fsspec, tensorboard, pandas, pyarrow, jinja2). torchao: fp8.
wheels=(torchtitan==0.2.2 torchdata==0.11.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
    xxhash==4.1.0 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0 tomli-w==1.2.0
    torchao==0.18.0)

absolute() { # a path given relative to where the caller is
    case $1 in /*) printf '%s' "$1" ;; *) printf '%s' "$here/$1" ;; esac
}

if [[ ${1:-} == --collect-wheels ]]; then
    folder=$(absolute "${2:?--collect-wheels needs a folder}")
    mkdir -p "$folder"
    platforms=()
    for glibc in 28 27 24 17; do
        platforms+=(--platform "manylinux_2_${glibc}_x86_64")
    done
    "$python" -m pip download --no-deps --only-binary=:all: --implementation cp \
        --python-version "${WHEELS_PYTHON:-3.12}" "${platforms[@]}" --platform manylinux2014_x86_64 \
        --dest "$folder" "${wheels[@]}"
    echo "collected for Python ${WHEELS_PYTHON:-3.12}: $(du -sh "$folder" | cut -f1) in $folder"
    exit 0
fi

arguments=()
folder=
while (($#)); do
    case $1 in
        --wheels)
            folder=$(absolute "${2:?--wheels needs the folder that --collect-wheels made}")
            shift 2
            ;;
        --out)
            arguments+=("$1" "$(absolute "${2:?--out needs a path}")")
            shift 2
            ;;
        *)
            arguments+=("$1")
            shift
            ;;
    esac
done
if [[ -n $folder ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    # Their own names only: torch and numpy of the machine stay what they are.
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --find-links "$folder" --target "$site" "${wheels[@]}"
    PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
command=("$python" -m tools.gpu_check ${arguments[@]+"${arguments[@]}"})
if [[ -n $folder ]]; then
    "${command[@]}" # not exec: the folder is removed behind it
else
    exec "${command[@]}"
fi

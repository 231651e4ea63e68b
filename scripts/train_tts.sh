#!/usr/bin/env bash
# `titan-tts train` on NGPU processes per machine, on one machine or several. Uses .venv unless PYTHON is set.
#   NGPU=8 CONFIG=train_configs/dit_tts_800m.toml scripts/train_tts.sh [--section.key value ...]
#   NGPU=8 CONFIG=train_configs/dit_tts_800m.toml scripts/train_tts.sh --dry-run   (starts nothing)
#   NNODES=4 MASTER_ADDR=host0 MASTER_PORT=29500 NGPU=8 CONFIG=... scripts/train_tts.sh   (on every machine)
set -euo pipefail
config=${CONFIG:-train_configs/debug.toml}
[[ -e $config ]] && config=$(realpath "$config") # relative to the current folder, else to the checkout
cd "$(dirname "$0")/.."

# Another active environment may have torch, but only setup.sh's is known to have torchtitan.
[[ -x .venv/bin/python ]] && python=.venv/bin/python || python=python3
[[ ${NGPU:-1}${NNODES:-1} == 11 ]] && unset RANK # of a launcher around this script
exec "${PYTHON:-$python}" -m titan_tts train "$config" --nproc "${NGPU:-1}" --nodes "${NNODES:-1}" \
    ${MASTER_ADDR:+--rendezvous "$MASTER_ADDR:${MASTER_PORT:-29500}"} "$@"

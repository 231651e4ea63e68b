#!/usr/bin/env bash
# Trains on NGPU processes per machine, on one machine or several. Uses .venv unless PYTHON is set.
#   NGPU=8 CONFIG=train_configs/dit_tts_800m.toml scripts/train_tts.sh [--section.key value ...]
#   NGPU=8 CONFIG=train_configs/dit_tts_800m.toml scripts/train_tts.sh --dry-run   (starts nothing)
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host0 MASTER_PORT=29500 NGPU=8 CONFIG=... scripts/train_tts.sh
set -euo pipefail
config=${CONFIG:-train_configs/debug.toml}
[[ -e $config ]] && config=$(realpath "$config") # relative to the current folder, else to the checkout
cd "$(dirname "$0")/.."
# Batches of several shapes fragment the allocator's fixed segments.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

# Another active environment may have torch, but only setup.sh's is known to have torchtitan.
[[ -x .venv/bin/python ]] && python=.venv/bin/python || python=python3
python=${PYTHON:-$python}
for argument in "$@"; do
    case $argument in --dry[-_]run*)
        # The last number counts, so one that is given as an argument.
        gpus=()
        [[ -n ${NGPU:-}${NNODES:-} ]] && gpus=(--dry-run-gpus $((${NGPU:-1} * ${NNODES:-1})))
        exec "$python" train.py --job.config_file "$config" "${gpus[@]}" "$@"
        ;;
    esac
done
if [[ ${NGPU:-1}${NNODES:-1} == 11 ]]; then
    unset RANK # of a launcher around this script
    exec "$python" train.py --job.config_file "$config" "$@"
fi
rendezvous=(--rdzv_backend c10d)
if [[ ${NNODES:-1} == 1 ]]; then
    rendezvous+=(--rdzv_endpoint localhost:0)
else
    rendezvous+=(--rdzv_endpoint "${MASTER_ADDR:?set MASTER_ADDR to the first machine}:${MASTER_PORT:-29500}"
                 --node_rank "${NODE_RANK:-0}")
fi
exec "$python" -m torchtitan.models.dit_tts.torchrun \
    --nnodes "${NNODES:-1}" --nproc_per_node "${NGPU:-1}" "${rendezvous[@]}" \
    train.py --job.config_file "$config" "$@"

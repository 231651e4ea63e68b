#!/usr/bin/env bash
# The main job: sets up, prepares the embedded speech corpus, trains the debug flavor on it, lets it
# say held-out texts in every voice and prints how well a recogniser reads them.
#   scripts/main_job.sh [--section.key value ...]     (options of the training)
set -euo pipefail
cd "$(dirname "$0")/.."
corpus=assets/spoken_digits/spoken_digits.tar
data=outputs/data/spoken_digits
run=outputs/debug
SECONDS=0

scripts/setup.sh speech
.venv/bin/titan-tts prepare "$corpus" "$data"
prepared=$SECONDS

if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    processes=1
else
    # Two processes of half the cores each are steadier than one of all: no thread waits for another.
    cores=$(nproc)
    processes=$((cores > 1 ? 2 : 1))
    export OMP_NUM_THREADS=$((cores / processes))
fi
PYTHON=.venv/bin/python NGPU=$processes CONFIG=train_configs/debug.toml scripts/train_tts.sh \
    --job.dump_folder outputs --job.experiment debug \
    --parallelism.data_parallel_replicate_degree "$processes" "$@"
trained=$SECONDS

OMP_NUM_THREADS=$(nproc) .venv/bin/titan-tts evaluate "$run" --heldout "$data/heldout" --recordings "$corpus"
echo "set-up and preparation ${prepared} s, training $((trained - prepared)) s," \
    "generation and recognition $((SECONDS - trained)) s, together ${SECONDS} s"

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
# The corpus is level-matched and trimmed already.
.venv/bin/titan-tts prepare "$corpus" "$data" --loudness off --max-silence off --overwrite
prepared=$SECONDS

precision=float32
if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    precision=bfloat16
else
    if grep -qE 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null; then
        precision=bfloat16 # elsewhere the CPU would emulate it
    fi
    # More threads than this only wait for each other on so small a model. They wait actively but
    # briefly: asleep, every product wakes them first (a third slower); spinning for long, a neighbour
    # on one of the cores makes a step many times slower.
    cores=$(nproc)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}
    export OMP_WAIT_POLICY=active GOMP_SPINCOUNT=3000
    # Activations go back to the heap, not to the kernel: about a twentieth less time.
    export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=17179869184
fi
PYTHON=.venv/bin/python NGPU=1 CONFIG=train_configs/debug.toml scripts/train_tts.sh \
    --job.dump_folder outputs --job.experiment debug --training.mixed_precision_param "$precision" "$@"
trained=$SECONDS

.venv/bin/titan-tts evaluate "$run" --heldout "$data/heldout" --recordings "$corpus"
echo "set-up and preparation ${prepared} s, training $((trained - prepared)) s ($precision)," \
    "generation and recognition $((SECONDS - trained)) s, together ${SECONDS} s"

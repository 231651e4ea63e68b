#!/usr/bin/env bash
# The main job: sets up .venv, fine-tunes the base voice on 20 minutes of a voice that it has never heard, and lets Whisper
# write down what the recordings, the base and the result say.
#   scripts/main_job.sh
#   NAME=mine scripts/main_job.sh --debug.seed 1 ...     (options of `titan-tts finetune`; the result is outputs/mine)
set -euo pipefail
cd "$(dirname "$0")/.."
out=outputs/${NAME:-rms}
SECONDS=0

scripts/setup.sh speech,whisper-tiny
unset PYTHONDONTWRITEBYTECODE # .venv is our own: what a start compiles, the next need not
ready=$SECONDS
. scripts/threads.sh
steps=${STEPS:-$([[ $precision = float32 ]] && echo 100 || echo 150)} # in float32 a step takes 1.5 times as long
.venv/bin/titan-tts finetune titan_tts:base assets/rms/rms.tar "$out" --language en --steps "$steps" \
    --recognizer whisper-tiny.en --max-utterances "${TEXTS:-24}" --validation.freq "$steps" --validation.samples 16 "$@"
.venv/bin/titan-tts generate "$out/run" --step best --speaker rms --out "$out/hello.wav" \
    --text "Twenty minutes of speech were enough. What shall I say next?"
echo "set-up ${ready} s, fine-tuning and comparison $((SECONDS - ready)) s ($precision);" \
    "listen to $out/hello.wav, open $out/comparison.html"

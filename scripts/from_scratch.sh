#!/usr/bin/env bash
# Trains the debug flavor from nothing: sets up .venv, prepares the embedded spoken digits, trains on them, synthesizes
# held-out texts in every voice and prints their word error rate.
#   scripts/from_scratch.sh
#   NAME=mine scripts/from_scratch.sh --section.key value ...     (options of the training; the run is outputs/mine)
set -euo pipefail
cd "$(dirname "$0")/.."
corpus=assets/spoken_digits/spoken_digits.tar
data=outputs/data/spoken_digits
name=${NAME:-debug}
run=outputs/$name
words=zero,one,two,three,four,five,six,seven,eight,nine
SECONDS=0
if [[ -e $run/state.json && $# -gt 0 ]]; then
    echo "error: $run is there and may have been trained with other options; give another NAME=..." >&2
    exit 2
fi

scripts/setup.sh speech
unset PYTHONDONTWRITEBYTECODE # .venv is our own: what a start compiles, the next need not
# The corpus is normalized and trimmed already.
.venv/bin/titan-tts prepare "$corpus" "$data" --loudness off --max-silence off
prepared=$SECONDS

. scripts/threads.sh
PYTHON=.venv/bin/python NGPU=1 CONFIG=train_configs/debug.toml scripts/train_tts.sh \
    --training.mixed_precision_param "$precision" --samples.freq 550 --samples.recognizer "words:$words" \
    --samples.speaker_scorer resemblyzer "$@" --job.dump_folder outputs --job.experiment "$name"
trained=$SECONDS

.venv/bin/titan-tts evaluate "$run" --test "$data/heldout" --recordings "$corpus" \
    --recognizer "words:$words" --speaker-scorer resemblyzer --dtype "$precision" --seeds 1
echo "set-up and preparation ${prepared} s, training $((trained - prepared)) s ($precision)," \
    "generation and recognition $((SECONDS - trained)) s, together ${SECONDS} s"

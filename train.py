"""Trains a model: python train.py --job.config_file X.toml [--section.key value ...]

One process by default; torchrun (scripts/train_tts.sh) starts several. --dry-run trains nothing: it
prints parameters, memory per GPU, downloads and the arithmetic of a step (--dry-run --nproc N). --help
lists the keys. It does what `titan-tts train` does. From an installed package use `titan-tts train`.
"""

import sys

from titan_tts.cli import main

if __name__ == "__main__":
    help_words = dict.fromkeys(("-h", "--help"), "--help-config")
    sys.exit(main(["train", *(help_words.get(each, each) for each in sys.argv[1:])]))

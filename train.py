"""Trains a model: python train.py --job.config_file X.toml [--section.key value ...]

One process by default; torchrun (scripts/train_tts.sh) starts several. --dry-run trains nothing: it
prints parameters, memory per GPU, downloads and the arithmetic of a step (--dry-run-gpus N). --help
lists the keys. From an installed package use `titan-tts train`.
"""

import sys

from titan_tts.launch.train_command import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))

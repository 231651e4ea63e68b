"""Trains a model: python train.py --job.config_file X.toml [--section.key value ...]

One process by default; torchrun (scripts/train_tts.sh) starts several.
"""

import sys

from torchtitan.models.dit_tts.main import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))

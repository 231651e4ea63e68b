"""Trains a model: python train.py --job.config_file X.toml [--section.key value ...]

One process by default; torchrun (scripts/train_tts.sh) starts several. With --dry-run nothing is
trained: it prints parameters, memory a GPU, downloads and a step's arithmetic (--dry-run-gpus N).
"""

import sys

from torchtitan.models.dit_tts.main import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))

"""What tests of plans share: a small config, and the passes that they measure."""

from dataclasses import replace
from pathlib import Path

from titan_tts.plan.devices import find_device
from torchtitan.models.dit_tts.config.manager import load_config

DEBUG = Path(__file__).resolve().parents[2] / "train_configs/debug.toml"
H200 = find_device("H200")
SMALL = ["--data.max_frames=64", "--data.num_buckets=2", "--encoder.n_layers=1"]
SMALL += ["--training.mixed_precision_param=bfloat16"]
SMALL += ["--compile.components=model"]  # each stack takes seconds to compile


def debug_config(*arguments: str, **sections: dict):
    """The debug config with short batches."""
    return shipped_debug_config(*SMALL, *arguments, **sections)


def shipped_debug_config(*arguments: str, **sections: dict):
    config = load_config([f"--job.config_file={DEBUG}", *arguments])
    for section, values in sections.items():
        setattr(config, section, replace(getattr(config, section), **values))
    return config

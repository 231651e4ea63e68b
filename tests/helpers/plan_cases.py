"""What the tests of plans share: a small config and a forecaster for it."""

from pathlib import Path

from torchtitan.models.dit_tts.config import load_config
from torchtitan.models.dit_tts.planning.constants import guesses
from torchtitan.models.dit_tts.planning.devices import cluster_of, find_device
from torchtitan.models.dit_tts.planning.forecast import Forecaster

DEBUG = Path(__file__).resolve().parents[2] / "train_configs/debug.toml"
H200 = find_device("H200")
SMALL = [
    "--data.max_frames=64",
    "--data.num_buckets=2",
    "--training.mixed_precision_param=bfloat16",
    "--encoder.n_layers=1",
]


def debug_config(*arguments: str):
    return load_config([f"--job.config_file={DEBUG}", *SMALL, *arguments])


def forecaster(config, gpus: int = 1, device=H200, *, shorter: bool = False) -> Forecaster:
    return Forecaster(config, cluster_of(device, gpus, gpus), guesses(), shorter=shorter)

"""A run to sample from (`loaded`, a fixture), with `shards` whose samples, voices and lengths can be distinguished."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.row_model import CHANNELS, RowModel
from titan_tts.speak.load_run import LoadedRun
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.data.dataset import open_training_data
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.text.durations import DURATIONS_FILE, fit_durations
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary

SPEAKERS = ("ann", "bob")
TOKENIZER = UnitTokenizer(
    make_vocabulary("bytes", "", ["speaker", "duration"], {"speaker": SPEAKERS}, max_seconds=3.0)
)
LONG_REFERENCE = 9
"""frames; the run takes at most 6"""

HOP = 4
"""samples per frame of the codec below"""


def write_numbered_shards(folder: Path) -> Path:
    """Two shards with the same keys; sample n has n + 2 frames of value n, its reference n + 10."""

    def latents(frames: int, value: float) -> np.ndarray:
        return np.full((frames, CHANNELS), value, np.float16)

    for shard in range(2):
        samples = []
        for key in range(3):
            number = 3 * shard + key
            # The longest reference is neither the first sample's of its speaker nor the last's.
            length = LONG_REFERENCE if number in (2, 3) else 4
            text = " ".join(["one", "two"] * (number + 1))
            metadata = {"text": text, "speaker": SPEAKERS[number % 2], "target_duration": 99.0}
            arrays = latents(number + 2, number), latents(length, number + 10)
            samples.append(Triplet(f"a/{key}", *arrays, metadata))
        write_shard(folder / f"s{shard}.tar", samples)
    return folder


@dataclass
class Echo:
    """A codec whose waveform is the latents."""

    name: str = "echo"
    sample_rate: int = 25 * HOP
    hop_length: int = HOP
    latent_channels: int = CHANNELS
    frames_per_second: float = 25.0

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :HOP].flatten() / 100


def write_durations(folder: Path, config: JobConfig) -> None:
    """As the start of a run does."""
    fit = fit_durations(open_training_data(config.data), config.encoder)
    (folder / DURATIONS_FILE).write_text(fit.to_json())


def make_run(folder: Path, shards: Path) -> LoadedRun:
    config = load_config([f"--data.path={shards}"])
    config.data.latent_channels = CHANNELS
    config.data.max_speaker_frames = 6
    config.sampling.steps, config.sampling.text_scale = 4, 2.0
    config.sampling.speaker_scale, config.sampling.min_t = 3.0, 0.25
    write_durations(folder, config)
    return LoadedRun(
        *(folder, config, 7, "raw", RowModel(), None, TOKENIZER, FlowMatching()),
        torch.device("cpu"),
    )


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    return write_numbered_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def loaded(tmp_path, shards) -> LoadedRun:
    return make_run(tmp_path, shards)

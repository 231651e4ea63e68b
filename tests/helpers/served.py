"""A synthesizer of the sampled run, whose speech identifies its text, voice and length."""

from pathlib import Path

import pytest

from tests.helpers.sampled_run import Echo, make_run
from titan_tts.speak.lengths import open_lengths
from titan_tts.speak.speech_data import open_speech_data
from titan_tts.speak.synthesizer import Synthesizer
from torchtitan.models.dit_tts.config.job_config import Sampling


def make_synthesizer(folder: Path, shards: Path) -> Synthesizer:
    loaded = make_run(folder, shards)
    data = loaded.config.data
    sampling, speech_data = (
        Sampling(steps=2, text_scale=0.0),
        open_speech_data(loaded.folder, loaded.config),
    )
    lengths = open_lengths("fit", 1.0, loaded, lambda: speech_data.durations)
    return Synthesizer(loaded, Echo(), speech_data, sampling, lambda: lengths, data.path)


@pytest.fixture
def synthesizer(tmp_path, shards) -> Synthesizer:
    return make_synthesizer(tmp_path, shards)

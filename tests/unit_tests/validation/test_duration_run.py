"""A run that learns how long texts take in voices whose rates are known, and what it leaves to generation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.small_models import small_args
from tests.helpers.tiny_runs import Folder
from titan_tts.speak.lengths import find_predictor, open_lengths
from titan_tts.speak.load_run import load_run
from titan_tts.speak.utterance import Utterance, Voice
from torchtitan.models.dit_tts import model_config
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.config.manager import load_run_config
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.model_config import DiTTTSModelConfig
from torchtitan.models.dit_tts.text.durations import fit_durations, stored_durations

pytestmark = pytest.mark.long
CHANNELS = 8
FRAMES = {"a": 1, "b": 2, "c": 4, "d": 6}
RATES = {"fast": 1, "slow": 2}
OPTIONS = [
    "--model.flavor=duration",
    "--objective.text_dropout=0",
    "--activation_checkpoint.mode=none",
    "--data.max_frames=96",
    "--data.num_buckets=2",
    "--ema.decays=0.9",
    "--optimizer.lr=0.01",
    "--validation.freq=50",
    "--validation.times=1",
    "--validation.samples=24",
]


def make_shards(folder: Path, count: int, seed: int) -> Path:
    """Samples of each speaker, whose latents differ in the sign."""
    generator, samples = np.random.default_rng(seed), []
    for number in range(count):
        text = "".join(generator.choice(list(FRAMES), size=int(generator.integers(2, 9))))
        for sign, (speaker, rate) in zip((-1, 1), RATES.items()):
            frames = rate * sum(map(FRAMES.__getitem__, text))
            latents = generator.normal(sign, 0.2, (frames + 8, CHANNELS)).astype(np.float16)
            metadata = {"text": text, "speaker": speaker}
            samples.append(Triplet(f"{speaker}{number}", latents[8:], latents[:8], metadata))
    folder.mkdir(parents=True)
    write_shard(folder / "0.tar", samples)
    return folder


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    small = DiTTTSModelConfig(**vars(small_args(task="duration", n_layers=1)))
    monkeypatch.setitem(model_config._FLAVORS, "duration", small)
    make_shards(tmp_path / "data/heldout", 12, 2)
    return make_shards(tmp_path / "data/train", 60, 1)


def test_it_learns_text_and_voice_and_generation_finds_it(tmp_path, train, data):
    more = [f"--data.path={data}", "--training.steps=200", "--metrics.log_freq=50"]
    assert train("duration", *OPTIONS, *more, "--checkpoint.interval=200") == 0
    folder = tmp_path / "duration"
    first, *_, last = Folder(folder).validation()
    assert last["heldout_loss"] < 0.1 and last["within_10_percent"] > 0.6, last
    assert last["seconds_error"] < 0.08 and last["seconds_error"] < first["seconds_error"]
    assert last["text_gain"] > 0.1 and last["speaker_gain"] > 0.1

    fit = stored_durations(folder)
    again = fit_durations(open_dataset(str(data), CHANNELS), Encoder())
    assert (fit.weights == again.weights).all() and fit.speaker_scale == again.speaker_scale

    # Beside a run of the same data; what it predicts does not depend on the rest of the batch.
    speaking = load_run(folder)
    config = load_run_config(folder)
    assert find_predictor(tmp_path / "speech", config).folder == folder
    lengths = open_lengths("", 1.0, speaking, lambda: fit)
    texts = [
        Utterance(text, Voice(torch.full((frames, CHANNELS), sign)))
        for text, frames, sign in (("abcd", 8, -1.0), ("dd", 3, 1.0), ("ab" * 9, 5, 1.0))
    ]
    found = lengths.estimate(texts)
    alone = [lengths.estimate([text])[0] for text in texts]
    assert found == pytest.approx(alone, rel=1e-5)
    assert found[0] == pytest.approx(13, rel=0.15) and found[1] == pytest.approx(24, rel=0.15)
    assert found[2] > 35  # of 54, for a text more than twice as long as any in training

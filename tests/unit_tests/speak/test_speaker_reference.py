"""References of a speaker: recordings treated as the training data were, or samples of the data."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tests.helpers.sentences import refused
from titan_tts.prepare.settings import AudioSettings
from titan_tts.speak import speech_data
from titan_tts.speak.speech_data import (
    TrainingShards,
    encode_reference,
    reference_settings,
)
from tools.harness.dac_vae_checkpoints import write_tiny_dac_vae
from torchtitan.models.dit_tts.config.job_config import Data, Encoder
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.codec.dac_vae import DacVaeCodec


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> DacVaeCodec:
    return build_codec(str(write_tiny_dac_vae(tmp_path_factory.mktemp("dac_vae"))))


def recording(seconds: float, rate: int, level: float = 0.1) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * 220 * time) * (1 + np.sin(9 * time)) / 2).astype(np.float32)


def write(path: Path, samples: np.ndarray, rate: int = 48_000) -> Path:
    soundfile.write(path, samples, rate, subtype="FLOAT")
    return path


@pytest.mark.long
def test_reference_of_any_rate_channels_and_level(codec, tmp_path):
    path = write(tmp_path / "voice.wav", recording(1.0, 48_000))
    at_level = encode_reference(path, codec, AudioSettings(), 384)
    as_is = encode_reference(path, codec, AudioSettings(loudness=None), 384)
    assert at_level.shape == as_is.shape == (25, 128)
    assert (at_level - as_is).abs().max() > 0.1
    quiet = recording(1.0, 44_100, level=0.01)
    write(path, np.stack([quiet, quiet], axis=1), 44_100)
    other = encode_reference(path, codec, AudioSettings(), 384)
    # Within what resampling leaves of the last frames.
    assert (other - at_level)[:18].abs().max() < 0.05 * at_level.std()


def test_the_level_is_that_of_what_the_model_takes(codec, tmp_path, monkeypatch):
    """The end of a long recording is twenty times as loud."""
    first, last = recording(0.8, 48_000), recording(0.8, 48_000, level=0.9)
    path = write(tmp_path / "long.wav", np.concatenate([first / 2, last]))
    cut = encode_reference(path, codec, AudioSettings(), 20)
    alone = encode_reference(write(tmp_path / "cut.wav", first), codec, AudioSettings(), 384)
    assert cut.shape == (20, 128)
    torch.testing.assert_close(cut, alone, atol=1e-3 * float(alone.std()), rtol=0)
    # One that is too long to be read is taken up to there: here 0.8 s of one channel.
    monkeypatch.setattr(speech_data, "decode", partial(speech_data.decode, longest=0.4))
    read = encode_reference(path, codec, AudioSettings(), 384)
    torch.testing.assert_close(read, alone, atol=1e-3 * float(alone.std()), rtol=0)


def test_references_without_a_voice(codec, tmp_path):
    path = tmp_path / "voice.wav"

    def encode() -> torch.Tensor:
        return encode_reference(path, codec, AudioSettings(), 384)

    write(path, np.zeros(48_000, np.float32))
    refused(encode, f"--reference {path}: ", "quieter than -70 LUFS")
    write(path, recording(0.1, 48_000))
    refused(encode, f"--reference {path}: ", "has 0.100 s of sound")
    path.write_text("no audio")
    refused(encode, f"--reference {path}: ")


def test_references_are_treated_as_the_data_were(codec, tmp_path):
    def data(name: str, **audio) -> str:
        """[data] path of data with a prepare.json, as far as it is read."""
        (tmp_path / name).mkdir()
        settings = {"codec": "dac_vae", "codec_fingerprint": codec.fingerprint, "audio": audio}
        (tmp_path / name / "prepare.json").write_text(json.dumps({"settings": settings}))
        return str(tmp_path / name / "train")

    as_they_are = AudioSettings(loudness=None, max_silence=None)
    off = data("off", loudness=None, max_silence=None, max_seconds=0.1)
    other = data("other", loudness=-23.0, max_silence=0.5)
    assert reference_settings(off) == as_they_are  # and no filter
    assert reference_settings([other, off]) == AudioSettings(-23.0, 0.5)
    assert reference_settings(data("old")) == reference_settings(str(tmp_path / "nowhere"))
    assert reference_settings(data("older")) == AudioSettings(-16.0, 0.25)
    voice = np.concatenate([np.zeros(24_000, np.float32), recording(1.0, 48_000)])
    path = write(tmp_path / "voice.wav", voice)
    given = encode_reference(path, codec, as_they_are, 384)
    assert torch.equal(given, codec.encode(torch.from_numpy(voice)))
    assert len(encode_reference(path, codec, AudioSettings(), 384)) < len(given)


@pytest.mark.parametrize(
    "limit, wanted",
    [
        # ann's longest reference is enough, or is followed by her longest recordings. Cat and dan have no reference.
        (6, {"ann": [1] * 6, "cat": [3] * 8, "dan": [5] * 7}),
        (7, {"ann": [1] * 6 + [0] * 9, "cat": [3] * 8, "dan": [5] * 7}),
        (
            30,
            {
                "ann": [1] * 6 + [0] * 9 + [2] * 7 + [1] * 5,
                "cat": [3] * 8,
                "dan": [5] * 7 + [4] * 3,
            },
        ),
    ],
)
def test_a_speaker_of_the_data_gives_as_much_as_the_model_hears(tmp_path, limit, wanted):
    lengths = [("ann", 9, 4), ("ann", 5, 6), ("ann", 7, 5), ("cat", 8, 0), ("dan", 3, 0)]
    samples = []
    for number, (speaker, frames, reference) in enumerate([*lengths, ("dan", 7, 0)]):
        arrays = [np.full((n, 8), number, np.float16) for n in (frames, reference)]
        samples.append(Triplet(f"k{number}", *arrays, {"text": "x", "speaker": speaker}))
    write_shard(tmp_path / "s.tar", samples)
    data = Data(path=str(tmp_path), latent_channels=8, max_speaker_frames=limit)
    shards = TrainingShards(data, Encoder(), None)
    for speaker, values in wanted.items():
        assert shards.reference(speaker).tolist() == [[float(value)] * 8 for value in values]

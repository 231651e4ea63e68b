"""A teacher's features: made from the latents' sound, stored beside the shards, and learned from."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.speech_checkpoints import write_tiny_wav2vec2
from tests.helpers.tiny_runs import Folder
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.codec import build_codec
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.data.build import open_training_data
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra import feature_cache
from torchtitan.models.dit_tts.infra.teacher import (
    SpeechTeacher,
    principal_components,
    ready_teacher_features,
)

DIM = 6


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_tiny_wav2vec2(tmp_path_factory.mktemp("teacher") / "wav2vec2")


@pytest.fixture
def data(tmp_path):
    return make_shards(
        tmp_path / "data", 12, frames=lambda generator: int(generator.integers(20, 33))
    )


def options(data, teacher):
    return [
        f"--data.path={data}",
        "--data.latent_channels=128",
        f"--alignment.teacher={teacher}",
        f"--alignment.teacher_dim={DIM}",
    ]


def read_all(features):
    found = []
    for sample, frames in enumerate(features.tokens):
        out = np.zeros((frames, features.width), np.float16)
        assert features.read(sample, out.view(np.int16)) == frames
        found.append(torch.from_numpy(out).float())
    return found


@pytest.mark.long
def test_components_of_the_hidden_states_of_every_frame(data, teacher, monkeypatch):
    config = load_config(options(data, teacher))
    dataset = open_training_data(config.data)
    features = ready_teacher_features(dataset, config)
    assert features.width == DIM and (features.tokens == dataset.frames).all()
    files = sorted((data / "teacher_features").glob("wav2vec2-*/*.safetensors"))
    assert [file.stem for file in files] == ["000000", "000001"]
    assert not (data / "text_features").exists()

    codec, encoder = build_codec("mel_dct"), SpeechTeacher(str(teacher), 0, "cpu")
    assert encoder.layer == 3
    hidden = []
    for sample in range(len(dataset)):
        latents, _ = dataset.read(sample)
        sound = codec.decode(torch.from_numpy(latents)).numpy()
        hidden.append(encoder.frames(sound, codec.sample_rate, len(latents)))
        assert hidden[-1].shape == (len(latents), 32)
    mean, vectors = principal_components(torch.cat(hidden), DIM)
    for found, states in zip(read_all(features), hidden, strict=True):
        torch.testing.assert_close(found, (states - mean) @ vectors, atol=5e-3, rtol=5e-3)

    # Once made they are read; a file that is gone is made as it was.
    before = files[1].read_bytes()
    files[1].unlink()
    again = ready_teacher_features(dataset, config)
    assert files[1].read_bytes() == before and again.encoder_fingerprint
    monkeypatch.setattr(SpeechTeacher, "frames", lambda *_: pytest.fail("made again"))
    released = []
    monkeypatch.setattr(feature_cache.device_module, "empty_cache", lambda: released.append(True))
    ready_teacher_features(dataset, config)
    assert released  # also where the teacher was loaded for its fingerprint alone


def test_every_weight_and_buffer_is_in_the_fingerprint():
    encoder = SpeechTeacher.__new__(SpeechTeacher)
    encoder.layer, encoder.extractor = 2, SimpleNamespace(to_json_string=lambda: "{}")
    encoder.model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(encoder.model.weight)
    assert encoder.fingerprint() == "ccbfa5ea182256a1"
    encoder.model.register_buffer(
        "calls", torch.tensor(3)
    )  # of no dimension, as a batch norm has it
    found = encoder.fingerprint()
    encoder.model.calls += 1
    assert len({"ccbfa5ea182256a1", found, encoder.fingerprint()}) == 3


def test_hidden_states_are_averaged_in_their_order(teacher):
    """Two of them for each frame, also of a sound shorter than the second that is padded."""
    encoder = SpeechTeacher(str(teacher), 2, "cpu")
    for frames in (10, 40):
        samples = np.random.default_rng(0).standard_normal(640 * frames).astype(np.float32)
        found = encoder.frames(samples, 16000, frames)
        padded = np.pad(samples, (0, max(0, 16000 - len(samples))))
        inputs = encoder.extractor(padded, sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            states = encoder.model(**inputs, output_hidden_states=True).hidden_states[2][0]
        assert len(states) == (49 if frames == 10 else 79)
        spoken = 20 if frames == 10 else 79
        for frame in range(frames):
            first, end = frame * spoken // frames, -(-(frame + 1) * spoken // frames)
            assert end - first in (2, 3)
            torch.testing.assert_close(found[frame], states[first:end].mean(0))


def test_principal_components_keep_the_most_variance():
    torch.manual_seed(0)
    values = torch.randn(50, 4) * torch.tensor([1.0, 5.0, 0.1, 2.0]) + 3
    mean, vectors = principal_components(values, 2)
    torch.testing.assert_close(mean, values.mean(0))
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(2), atol=1e-5, rtol=0)
    assert vectors.abs().argmax(0).tolist() == [1, 3] and (vectors.amax(0) > 0.9).all()
    with pytest.raises(InputError, match="teacher_dim = 5"):
        principal_components(values, 5)


@pytest.mark.long
def test_a_block_that_the_teacher_does_not_have(teacher):
    with pytest.raises(InputError, match="has 4 blocks, and teacher_hidden_layer = 5"):
        SpeechTeacher(str(teacher), 5, "cpu")


@pytest.mark.long
def test_a_run_learns_from_the_teacher_until_it_stops(tmp_path, data, teacher, train):
    given = ["--training.steps=4", "--alignment.teacher_weight=2"]
    runs = {
        "plain": [f"--data.path={data}", "--data.latent_channels=128"],
        "taught": [*options(data, teacher), *given, "--alignment.stop_fraction=1"],
        "never": [*options(data, teacher), *given, "--alignment.stop_fraction=0"],
        "half": [*options(data, teacher), *given, "--alignment.stop_fraction=0.5"],
        "both": [*options(data, teacher), *given, "--alignment.ctc_weight=0.1"],
    }
    rows = {}
    for name, arguments in runs.items():
        assert train(name, "--training.steps=4", *arguments) == 0
        rows[name] = Folder(tmp_path / name).metrics()
    plain, taught, never, half, both = rows.values()
    assert [row["loss"] for row in never] == [row["loss"] for row in plain]
    assert taught[0]["loss"] == plain[0]["loss"] and taught[3]["loss"] != plain[3]["loss"]
    assert taught[0]["grad_norm"] > 1.01 * plain[0]["grad_norm"]
    assert 0.5 < taught[0]["teacher"] < 1.5 and taught[3]["teacher"] < taught[0]["teacher"]
    assert [row["loss"] for row in half[:3]] == [row["loss"] for row in taught[:3]]
    assert half[2]["grad_norm"] < taught[2]["grad_norm"] and "ctc" in both[0]

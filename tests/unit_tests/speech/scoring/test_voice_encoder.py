"""Resemblyzer's voice encoder with random weights: its input by numpy, its parts, and what it needs."""

import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.helpers.sentences import refused
from tests.helpers.speech_checkpoints import noise, write_resemblyzer
from torchtitan.models.dit_tts.config.job_config import Samples
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import (
    check_pretrained,
    open_speaker_encoder,
)

RATE = 16_000


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(write_resemblyzer(tmp_path)), *sys.path])
    monkeypatch.delitem(sys.modules, "resemblyzer", raising=False)
    return tmp_path / "resemblyzer"


def slaney_bank():
    """(40, 201): triangles of area 1 between frequencies that are linear up to 1 kHz and logarithmic above."""
    step = np.log(6.4) / 27
    to_mel = lambda f: f * 3 / 200 if f < 1000 else 15 + np.log(f / 1000) / step  # noqa: E731
    to_hertz = lambda m: m * 200 / 3 if m < 15 else 1000 * np.exp(step * (m - 15))  # noqa: E731
    edges = np.array([to_hertz(m) for m in np.linspace(0, to_mel(8000.0), 42)])
    bins = np.arange(201) * RATE / 400
    rows = [
        np.interp(bins, edges[i : i + 3], [0, 2 / (edges[i + 2] - edges[i]), 0]) for i in range(40)
    ]
    return np.array(rows)


def test_hears_power_mels_of_a_level_part_by_part(package):
    encoder = open_speaker_encoder("resemblyzer")
    unit_means = lambda mels: torch.nn.functional.normalize(mels.mean(1), dim=1)  # noqa: E731
    network = Mock(side_effect=lambda m: torch.nn.functional.pad(unit_means(m), (0, 216)))
    encoder.network = network
    sound = Sound(0.001 * noise(3.0), RATE)
    (vector,) = encoder.embed([sound])
    samples = sound.waveform.numpy().astype(np.float64)
    samples *= 10 ** (-30 / 20) / np.sqrt(np.mean(samples**2))
    padded = np.pad(samples, 200)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = np.stack([padded[160 * i :][:400] * window for i in range(301)])
    mels = np.abs(np.fft.rfft(frames)) ** 2 @ slaney_bank().T
    wanted = np.stack([mels[start : start + 160] for start in (0, 80, 141)])
    np.testing.assert_allclose(network.call_args.args[0].numpy(), wanted, rtol=1e-3, atol=1e-7)
    means = wanted.mean(1) / np.linalg.norm(wanted.mean(1), axis=1, keepdims=True)
    np.testing.assert_allclose(vector[:40], means.sum(0) / np.linalg.norm(means.sum(0)), atol=1e-4)


def test_each_sound_has_its_own_vector(package):
    encoder = open_speaker_encoder("resemblyzer")
    sounds = [Sound(noise(seconds, n), RATE) for n, seconds in enumerate((5.0, 0.7, 0.0, 2.0))]
    found = encoder.embed(sounds)
    assert found.shape == (4, 256) and found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    for sound, vector in zip(sounds, found, strict=True):
        np.testing.assert_allclose(encoder.embed([sound])[0], vector, atol=1e-5)
    # A short sound is repeated to 1.6 s.
    long = Sound(sounds[1].waveform.repeat(3)[: 16 * RATE // 10], RATE)
    np.testing.assert_allclose(encoder.embed([long])[0], found[1], atol=1e-5)
    assert encoder.embed([]).shape == (0, 256)


def test_without_the_package_or_with_other_weights(package, monkeypatch):
    torch.save({"model_state": {}}, package / "pretrained.pt")
    refused(lambda: open_speaker_encoder("resemblyzer"), "install Resemblyzer 0.1.4 again")
    (package / "pretrained.pt").unlink()
    refused(lambda: open_speaker_encoder("resemblyzer"), "install Resemblyzer 0.1.4 again")
    monkeypatch.setattr("torchtitan.models.dit_tts.errors.find_spec", lambda name: None)
    words = "resemblyzer is not installed", "pip install --no-deps resemblyzer==0.1.4"
    refused(lambda: open_speaker_encoder("resemblyzer"), *words)
    refused(lambda: check_pretrained(Samples(speaker_scorer="resemblyzer")), *words)

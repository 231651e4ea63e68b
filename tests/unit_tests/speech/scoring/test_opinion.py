"""DNSMOS gives the scores of its own package, falls with noise, and needs no other library."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.speech_corpora import heldout
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import open_opinion_predictor

pytestmark = pytest.mark.long
RATE = 16_000
WINDOW = int(9.01 * RATE)  # that the network hears at once


@pytest.fixture
def dnsmos(monkeypatch):
    """Their code, without librosa: it makes the input of a network that does not count here."""
    mel = lambda y, **options: np.zeros((120, len(y) // 160), np.float32)  # noqa: E731
    fake = SimpleNamespace(
        feature=SimpleNamespace(melspectrogram=mel), power_to_db=lambda m, ref: m
    )
    monkeypatch.setitem(sys.modules, "librosa", fake)
    from speechmos import dnsmos

    yield dnsmos
    sys.modules.pop("speechmos.dnsmos", None)


def test_scores_are_those_of_the_package_and_fall_with_noise(dnsmos):
    predictor, recording = open_opinion_predictor("dnsmos"), next(heldout()).samples
    speech = np.resize(recording, 11 * RATE)
    for waveform in (recording, speech):
        found = predictor.score(Sound(torch.from_numpy(waveform), RATE))
        # They leave out some windows, whose length they round down.
        assert found == pytest.approx(dnsmos.run(waveform, RATE)["ovrl_mos"], abs=0.01)
    generator, scores = torch.Generator().manual_seed(0), []
    for level in (0.0, 0.01, 0.1):
        noise = level * torch.randn(WINDOW, generator=generator)
        scores.append(predictor.score(Sound(torch.from_numpy(speech[:WINDOW]) + noise, RATE)))
    assert scores[0] > scores[1] + 0.2 > scores[2] + 0.4
    silence = predictor.score(Sound(torch.zeros(WINDOW), RATE))
    assert predictor.score(Sound(torch.zeros(0), RATE)) == pytest.approx(silence)

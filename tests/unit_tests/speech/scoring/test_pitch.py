"""Median and range of F0, of voices whose F0 is known."""

import numpy as np
import pytest
import torch

from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.pitch import PitchTracker


def voice(hertz: np.ndarray, rate: int, level: float) -> Sound:
    """Ten harmonics of a fundamental frequency (n,)."""
    phase = 2 * np.pi * np.cumsum(hertz) / rate
    samples = level * sum(np.sin(k * phase) / k for k in range(1, 11))
    return Sound(torch.from_numpy(samples).float(), rate)


@pytest.mark.parametrize(
    "low, high, rate, level",
    [
        (90, 90, 16_000, 0.1),
        (220, 220, 24_000, 1e-4),
        (100, 200, 48_000, 0.1),
        (400, 300, 16_000, 0.5),
    ],
)
def test_a_glide_has_its_median_and_range(low, high, rate, level):
    """By time the quantiles of a glide in octaves are known."""
    octaves = np.linspace(np.log2(low), np.log2(high), 3 * rate)
    median, spread = PitchTracker().measure(voice(2**octaves, rate, level))
    assert median == pytest.approx(np.sqrt(low * high), rel=0.02)
    assert spread == pytest.approx(12 * 0.8 * abs(np.log2(high / low)), abs=0.6)


def test_what_has_no_voice_has_no_pitch():
    noise = 0.1 * torch.randn(16_000, generator=torch.Generator().manual_seed(0))
    for samples in (torch.zeros(0), torch.zeros(9000), torch.ones(7), noise, noise * torch.nan):
        assert PitchTracker().measure(Sound(samples, 16_000)) == (None, None)

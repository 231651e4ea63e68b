"""Spectrograms of generated speech."""

import pytest
import torch

from torchtitan.models.dit_tts.speech.sampling.plots import (
    MEL_BANDS,
    log_mel_decibels,
    save_spectrograms,
)


def test_spectrograms_show_levels_and_pitches(tmp_path):
    """A sine of a tenth of full scale is at -20 dB in the band of its frequency."""
    tone = 0.1 * torch.sin(2 * torch.pi * 1000 * torch.arange(16_000) / 16_000)
    picture = log_mel_decibels(tone, 16_000)
    assert picture.shape == (100, MEL_BANDS)
    # 1 kHz is 15 mel, half the scale at 8 kHz is 45.2 / 2 mel, and edges lie 45.2 / 81 apart.
    assert picture[50].argmax() == round(15 / (45.2455 / 81)) - 1
    assert float(picture[50].max()) == pytest.approx(-20, abs=3)  # the window spreads a little
    assert float(picture[50, -1]) < -80
    path = tmp_path / "new" / "comparison.png"
    save_spectrograms(path, [(r"from $5\x to ${a$", tone), ("short", torch.zeros(3000))], 16_000)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["comparison.png"]

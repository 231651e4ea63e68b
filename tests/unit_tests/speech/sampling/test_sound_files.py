"""Speech as sound files and as spectrograms."""

import io

import numpy as np
import pytest
import soundfile
import torch

from torchtitan.models.dit_tts.speech.sampling.plots import log_mel_decibels, save_spectrograms
from torchtitan.models.dit_tts.speech.sampling.sound_files import encoded, write_sound


def test_a_wav_holds_the_samples(tmp_path):
    path, waveform = tmp_path / "a.wav", torch.tensor([0.0, 0.5, -0.25, 3.0, -3.0])
    write_sound(path, waveform, 24_000)
    samples, rate = soundfile.read(path)
    assert rate == 24_000 and soundfile.info(path).subtype == "PCM_16"
    np.testing.assert_allclose(samples, [0.0, 0.5, -0.25, 1.0, -1.0], atol=1e-4)
    assert encoded(waveform, 24_000, "pcm") == path.read_bytes()[44:]


@pytest.mark.parametrize(
    "kind, rate, coded, format",
    [
        ("flac", 22_050, 22_050, "FLAC"),
        ("opus", 22_050, 48_000, "OGG"),
        ("mp3", 96_000, 48_000, "MP3"),
    ],
)
def test_other_formats_at_a_rate_that_they_have(kind, rate, coded, format):
    tone = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(rate) / rate)
    with soundfile.SoundFile(io.BytesIO(encoded(tone, rate, kind))) as file:
        assert (file.samplerate, file.format) == (coded, format)
        samples = file.read()
    assert abs(len(samples) / coded - 1) < 0.1
    middle = samples[coded // 4 : 3 * coded // 4]
    assert np.sqrt((middle**2).mean()) == pytest.approx(0.5 / 2**0.5, rel=0.05)
    assert np.abs(np.fft.rfft(middle)).argmax() == 220  # of half a second


@pytest.mark.long
def test_spectrograms_show_levels_and_pitches(tmp_path):
    """A sine of a tenth of full scale is at -20 dB in the band of its frequency."""
    tone = 0.1 * torch.sin(2 * torch.pi * 1000 * torch.arange(16_000) / 16_000)
    picture = log_mel_decibels(tone, 16_000)
    assert picture.shape == (100, 80)
    # 1 kHz is 15 mel, half the scale at 8 kHz is 45.2 / 2 mel, and edges lie 45.2 / 81 apart.
    assert picture[50].argmax() == round(15 / (45.2455 / 81)) - 1
    assert float(picture[50].max()) == pytest.approx(-20, abs=3)  # the window spreads a little
    assert float(picture[50, -1]) < -80
    path = tmp_path / "new" / "comparison.png"
    save_spectrograms(path, [(r"from $5\x to ${a$", tone), ("short", torch.zeros(3000))], 16_000)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["comparison.png"]

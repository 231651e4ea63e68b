"""The embedded codec: shapes, values, and that its decoder gives the speech back."""

import pytest
import torch

from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.speech.codec.spectrogram import (
    griffin_lim,
    hann_window,
    integrate_phase,
    invert_mel,
    istft,
    mel_filters,
    stft,
)

WINDOW, FILTERS = hann_window(640), mel_filters(80, 321, 16_000)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return build_codec("mel_dct")


def vowels(seconds: float = 1.2) -> torch.Tensor:
    """A gliding harmonic tone under two moving formants, with pauses: (samples,) at 16 kHz."""
    time = torch.arange(int(seconds * 16_000)) / 16_000
    pitch = 120 + 30 * torch.sin(2 * torch.pi * 1.5 * time)
    phase = 2 * torch.pi * torch.cumsum(pitch / 16_000, 0)
    wave = torch.zeros_like(time)
    for harmonic in range(1, 30):
        formants = (500 + 250 * torch.sin(5 * time), 1700 + 500 * torch.cos(7 * time))
        gain = sum(torch.exp(-(((harmonic * pitch - formant) / 150) ** 2)) for formant in formants)
        wave = wave + (gain + 0.01) * torch.sin(harmonic * phase)
    return 0.2 * wave * (torch.sin(2 * torch.pi * 2.5 * time) > -0.7)


def log_mel_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Mean absolute difference of log-mel amplitudes, floor -60 dB of the loudest band."""
    first, second = (stft(wave, WINDOW, 160).abs() @ FILTERS.T for wave in (first, second))
    floor = 1e-3 * float(first.max())
    return float(((first + floor).log() - (second + floor).log()).abs().mean())


def test_shapes_and_what_is_refused(codec, tmp_path):
    assert isinstance(codec, Codec) and codec.frames_per_second == 25.0
    for samples in (1, 640, 641):
        latents = codec.encode(0.1 * torch.sin(torch.arange(samples) * 0.1))
        assert latents.shape == (-(-samples // 640), 128) and latents.dtype == torch.float32
        wave = codec.decode(latents)
        assert wave.shape == (len(latents) * 640,) and wave.dtype == torch.float32
    batch = torch.stack([vowels()[start : start + 8000] for start in (0, 3000, 9000)])
    for row, waveform in zip(codec.encode_batch(batch), batch, strict=True):
        assert (row - codec.encode(waveform)).abs().max() <= 1e-5
    for waveforms in (torch.zeros(640), torch.zeros(0, 640), torch.full((1, 640), torch.nan)):
        refused(lambda: codec.encode_batch(waveforms), "waveforms have shape")
    for latents in (torch.zeros(0, 128), torch.zeros(3, 64), torch.full((1, 128), torch.inf)):
        refused(lambda: codec.decode(latents), "latents have shape")
    file = tmp_path / "mel_dct_stats.json"
    refused(lambda: build_codec(str(file)), "codec = ", "No such file")
    file.write_text("{")
    refused(lambda: build_codec(str(file)), "codec = ", "Expecting")


def test_latents_of_this_fingerprint(codec):
    """Values of a float64 reference written from the module's docstring. Whoever changes what the
    latents are changes the fingerprint with them: data and runs are matched by it alone."""
    time = torch.arange(1600, dtype=torch.float64) / 16_000
    wave = 0.3 * torch.sin(2 * torch.pi * (200 * time + 2000 * time**2))
    wave += 0.1 * torch.sin(2 * torch.pi * 1900 * time)
    latents = codec.encode(wave.float())
    assert codec.fingerprint == "84db51c559c36c16" and latents.shape == (3, 128)
    for found, expected in (
        (latents[0, :4], [-2.855086, 2.214162, 1.087140, 2.499339]),
        (latents[1, 56:60], [-0.035054, 0.156859, 0.913468, 1.801024]),
        (latents[2, 124:], [-0.152758, -0.128988, 0.429760, 1.083853]),
    ):
        torch.testing.assert_close(found, torch.tensor(expected), atol=3e-3, rtol=0)


def test_round_trip_keeps_the_speech_and_its_level(codec):
    wave = vowels()
    latents = codec.encode(wave)
    assert log_mel_distance(wave, codec.decode(latents)) < 0.3
    # The bar is one that a broken decoder fails: of the wrong latents, or with half of them gone.
    assert log_mel_distance(wave, codec.decode(latents.flip(0))) > 0.6
    assert log_mel_distance(wave, codec.decode(latents * (torch.arange(128) < 20))) > 0.4
    tone = 0.25 * torch.sin(2 * torch.pi * 440 * torch.arange(16_000) / 16_000)
    decoded = codec.decode(codec.encode(tone))[3200:12_800]
    assert 0.8 < float(decoded.square().mean().sqrt() / (0.25 / 2**0.5)) < 1.2
    loud = codec.decode(100 * torch.randn(5, 128, generator=torch.Generator().manual_seed(0)))
    assert torch.isfinite(loud).all() and loud.abs().max() <= 1


def test_the_steps_of_decoding():
    wave = vowels()[:16_000]
    assert torch.allclose(istft(stft(wave, WINDOW, 160), WINDOW, 160), wave, atol=1e-5)
    wanted = stft(wave, WINDOW, 160).abs()
    mel = wanted @ FILTERS.T + 0.01
    spectrum = invert_mel(mel, FILTERS, 10)
    assert (spectrum >= 0).all()
    assert float((spectrum @ FILTERS.T / mel).log().abs().mean()) < 0.01

    flat = torch.tensor([[0.2], [3.0]]).expand(2, 321)  # found by the start alone, where bands are
    start = invert_mel(flat @ FILTERS.T, FILTERS, 0)
    torch.testing.assert_close(start[:, 1:-1], flat[:, 1:-1])

    def error(phase: torch.Tensor, iterations: int = 0, **momentum: float) -> float:
        """How far |STFT| is from what was asked."""
        found = griffin_lim(wanted, phase, WINDOW, 160, iterations, **momentum)
        return float((stft(found, WINDOW, 160).abs() - wanted).norm() / wanted.norm())

    phase = integrate_phase(wanted, 640, 160)
    assert error(phase) < 0.2 * error(torch.zeros_like(wanted))
    assert error(phase, 16) < 0.85 * error(phase, 16, momentum=0.0) < 0.7 * error(phase)

"""Sounds of a page: players and spectrograms, embedded in it."""

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_tts.report.page import Sound

if TYPE_CHECKING:
    from torch import Tensor

    from torchtitan.models.dit_tts.speech.scoring.interface import Sound as Waveform

MAX_RATE = 48_000  # Hz; nobody hears frequencies above half of it


def with_spectrograms(sounds: Sequence[tuple[str, "Waveform"]]) -> list[Sound]:
    """(label, sound) as players and spectrograms on one scale of time and of loudness."""
    import torch

    from torchtitan.models.dit_tts.speech.sampling.plots import log_mel_decibels
    from torchtitan.models.dit_tts.speech.sampling.sound_files import encoded

    # At one rate, so that the bands of all pictures are the same.
    rate = min(sound.sample_rate for _, sound in sounds)
    spectrograms = [log_mel_decibels(torch.from_numpy(s.samples(rate)), rate) for _, s in sounds]
    loudest = max(float(one.max()) for one in spectrograms)
    longest = max(sound.seconds for _, sound in sounds)
    made = []
    for (label, sound), spectrogram in zip(sounds, spectrograms, strict=True):
        own_rate = min(sound.sample_rate, MAX_RATE)
        flac = encoded(torch.from_numpy(sound.samples(own_rate)), own_rate, "flac")
        picture = data_url("image/png", _picture(spectrogram, loudest))
        width = 100 * sound.seconds / longest
        made.append(Sound(label, sound.seconds, data_url("audio/flac", flac), picture, width))
    return made


def _picture(spectrogram: "Tensor", loudest: float) -> bytes:
    """(frames, bands) in dB as a PNG, one pixel each."""
    from matplotlib.image import imsave

    from torchtitan.models.dit_tts.speech.sampling.plots import DYNAMIC_RANGE_DB

    buffer, lowest = io.BytesIO(), loudest - DYNAMIC_RANGE_DB
    pixels = spectrogram.T.numpy()
    imsave(buffer, pixels, lowest, loudest, "magma", format="png", origin="lower")
    return buffer.getvalue()


def data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"

"""Joins pieces of speech without clicks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_tts.speak.utterance import Speech

PAUSE_SECONDS = 0.12
"""between two pieces"""

FADE_SECONDS = 0.005
"""at both ends of a piece; shorter than any sound of speech"""


def pause(sample_rate: int) -> Tensor:
    """(samples,) of silence."""
    return torch.zeros(int(PAUSE_SECONDS * sample_rate))


def part(waveform: Tensor, index: int, count: int, sample_rate: int) -> Tensor:
    """(samples,) that one of `count` pieces gives to the joined sound: faded in and out, behind a pause unless it is the
    first. A single piece stays as it is."""
    if count == 1:
        return waveform
    length = min(int(FADE_SECONDS * sample_rate), len(waveform) // 2)
    ramp = torch.linspace(0, 1, length + 1)[:-1]
    faded = waveform.clone()
    faded[:length] *= ramp
    faded[len(faded) - length :] *= ramp.flip(0)
    return torch.cat([pause(sample_rate), faded]) if index else faded


def join(spoken: Sequence[Speech]) -> Speech:
    """The speech of pieces with pauses between them."""
    rate, count = spoken[0].sample_rate, len(spoken)
    parts = [part(each.waveform, index, count, rate) for index, each in enumerate(spoken)]
    return Speech(torch.cat(parts), rate, torch.cat([each.latents for each in spoken]))

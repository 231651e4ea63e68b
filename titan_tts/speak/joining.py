"""Joins pieces of speech without clicks."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

PAUSE_SECONDS = 0.12
"""between two pieces"""

FADE_SECONDS = 0.005
"""at both ends of a piece; shorter than any sound of speech"""


def faded(waveform: Tensor, sample_rate: int) -> Tensor:
    """Fades a waveform (samples,) in from zero and out to zero."""
    length = min(int(FADE_SECONDS * sample_rate), len(waveform) // 2)
    ramp = torch.linspace(0, 1, length + 1)[:-1]
    faded = waveform.clone()
    faded[:length] *= ramp
    faded[len(faded) - length :] *= ramp.flip(0)
    return faded


def join(waveforms: Sequence[Tensor], sample_rate: int) -> Tensor:
    """(samples,) of pieces with pauses between them; a single piece stays as it is."""
    return torch.cat(list(joined(waveforms, len(waveforms), sample_rate)))


def pause(sample_rate: int) -> Tensor:
    """(samples,) of silence."""
    return torch.zeros(int(PAUSE_SECONDS * sample_rate))


def joined(waveforms: Iterable[Tensor], count: int, sample_rate: int) -> Iterator[Tensor]:
    """Yields what `join` makes of `count` waveforms, piece by piece."""
    for index, waveform in enumerate(waveforms):
        if count == 1:
            yield waveform
        else:
            before = [pause(sample_rate)] if index else []
            yield torch.cat([*before, faded(waveform, sample_rate)])

"""Speech in pieces, joined without clicks."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

PAUSE_SECONDS = 0.12
"""between two pieces"""

FADE_SECONDS = 0.005
"""at both ends of a piece; shorter than any sound of speech"""

OVERLAP_SECONDS = 0.02
"""in which a piece that continues another one takes over"""


def faded(waveform: Tensor, sample_rate: int) -> Tensor:
    """(samples,) that begins and ends at zero."""
    length = min(int(FADE_SECONDS * sample_rate), len(waveform) // 2)
    ramp = torch.linspace(0, 1, length + 1)[:-1]
    found = waveform.clone()
    found[:length] *= ramp
    found[len(found) - length :] *= ramp.flip(0)
    return found


def join(waveforms: Sequence[Tensor], sample_rate: int) -> Tensor:
    """(samples,) of pieces with pauses between them; a single one as it is."""
    return torch.cat(list(joined(waveforms, len(waveforms), sample_rate)))


def pause(sample_rate: int) -> Tensor:
    """(samples,) of silence."""
    return torch.zeros(int(PAUSE_SECONDS * sample_rate))


def overlap(sample_rate: int) -> int:
    """Samples of OVERLAP_SECONDS."""
    return int(OVERLAP_SECONDS * sample_rate)


def joined(waveforms: Iterable[Tensor], count: int, sample_rate: int) -> Iterator[Tensor]:
    """What `join` makes of `count` waveforms, piece by piece."""
    for place, waveform in enumerate(waveforms):
        if count == 1:
            yield waveform
        else:
            before = [pause(sample_rate)] if place else []
            yield torch.cat([*before, faded(waveform, sample_rate)])


def continued(pieces: Iterable[tuple[Tensor, Tensor]], sample_rate: int) -> Iterator[Tensor]:
    """One waveform of pieces that continue each other, piece by piece.

    Args:
        pieces: (lead, waveform): the samples of a piece, and before them the last `overlap` samples of the
            piece before as this one has them, into which the other's are faded.
    """
    length = overlap(sample_rate)
    ramp = torch.linspace(0, 1, length)
    held = torch.zeros(0)
    for lead, waveform in pieces:
        if len(held):
            yield held * (1 - ramp[: len(held)]) + lead[len(lead) - len(held) :] * ramp[: len(held)]
        end = len(waveform) - min(length, len(waveform))
        yield waveform[:end]
        held = waveform[end:]
    yield held

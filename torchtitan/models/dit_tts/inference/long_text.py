"""Texts that are too long to be said at once: split where they may pause, and joined without clicks."""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PAUSE_SECONDS = 0.12
"""between two pieces"""

FADE_SECONDS = 0.005
"""at both ends of a piece; shorter than any sound of speech"""

# Ends of sentences, then of clauses, then of words. A wrong one costs a short pause.
_BREAKS = (
    r"(?<=[.!?…])\s+|(?<=[.!?…][\"'”’)\]])\s+|(?<=[。！？])|\n+",
    r"(?<=[,;:–—])\s+|(?<=[、，；])",
    r"\s+",
)


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Pieces that fit, in order, as long as they may be, but for the first, which is one sentence at most,
    so that speech begins soon. A word that fits nowhere is a piece of its own.

    >>> split_text("One. Two two. Three, four", lambda piece: len(piece) < 11)
    ['One.', 'Two two.', 'Three,', 'four']
    """
    sentences = _parts(text, _BREAKS[0])
    first, *rest = [piece for each in sentences for piece in _fitting(each, fits, _BREAKS[1:])]
    return [first, *_joined(rest, fits)]


def _parts(text: str, pattern: str) -> list[str]:
    return [part.strip() for part in re.split(pattern, text) if part.strip()] or [text]


def _fitting(text: str, fits: Callable[[str], bool], breaks: Sequence[str]) -> list[str]:
    """The text, or where it does not fit its parts by the first kind of breaks that makes them fit."""
    if fits(text) or not breaks:
        return [text]
    parts = _parts(text, breaks[0])
    return _joined([piece for each in parts for piece in _fitting(each, fits, breaks[1:])], fits)


def _joined(pieces: Sequence[str], fits: Callable[[str], bool]) -> list[str]:
    """Neighbours together, as far as they fit."""
    found: list[str] = []
    for piece in pieces:
        both = f"{found[-1]} {piece}" if found else ""
        if found and fits(both):
            found[-1] = both
        else:
            found.append(piece)
    return found


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
    if len(waveforms) == 1:
        return waveforms[0]
    silence = pause(sample_rate)
    parts = [part for each in waveforms for part in (silence, faded(each, sample_rate))]
    return torch.cat(parts[1:])


def pause(sample_rate: int) -> Tensor:
    """(samples,) of silence."""
    return torch.zeros(int(PAUSE_SECONDS * sample_rate))

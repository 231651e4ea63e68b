"""Captions: how a voice sounds, as a short English phrase, by what has been measured.

Pitch, melody, speed and level have no absolute words, so they are told beside the whole collection: a recording is
low if it is in the lowest third and a listener would hear it lower than the median.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.pitch import PitchTracker

_NOISE = ((5.0, "with much background noise"), (20.0, "with some background noise"))
"""SNR in dB below which it is said; the bounds of quality in `collect`"""

_TELEPHONE_HZ = 4000.0
_IN_BAND = 0.999  # of the power of the first difference, which weighs consonants as the ear does

_LARGEST = 1e6  # of any figure


class _Scale(NamedTuple):
    step: float
    """dB from the median that one hears"""

    below: str
    above: str


_SCALES = {
    "pitch": _Scale(0.5, "low", "high"),
    "pitch_range": _Scale(2.0, "monotonous", "lively"),
    "chars_per_second": _Scale(0.8, "speaking slowly", "speaking fast"),
    "loudness": _Scale(2.0, "quiet", "loud"),
}

Thirds = Mapping[str, Sequence[float]]
"""figure -> its lower third, median and upper third in dB"""


@lru_cache(maxsize=1)
def _tracker() -> PitchTracker:
    return PitchTracker()


def voice_figures(waveform: np.ndarray, rate: int) -> dict[str, float | None]:
    """Measure (samples,) float32: the median pitch in Hz and its range in semitones, None where nothing is voiced, and the
    bandwidth in Hz. Raises InputError where SwiftF0 is not installed."""
    import torch

    pitch, pitch_range = _tracker().measure(Sound(torch.from_numpy(waveform), rate))
    power = np.cumsum(np.square(np.abs(np.fft.rfft(np.diff(waveform, prepend=np.float32(0))))))
    bandwidth = np.searchsorted(power, _IN_BAND * power[-1]) / len(power) * rate / 2
    return {
        "pitch": None if pitch is None else round(pitch, 1),
        "pitch_range": None if pitch_range is None else round(pitch_range, 2),
        "bandwidth": round(float(bandwidth)),
    }


def thirds(rows: Iterable[Mapping[str, Any]]) -> Thirds:
    """Return the thirds of a whole collection's figures: pitch, pitch_range, chars_per_second, loudness (LUFS), as far as given."""
    values: dict[str, list[float]] = {name: [] for name in _SCALES}
    for row in rows:
        for name in _SCALES:
            if (value := _decibels(row, name)) is not None:
                values[name].append(value)
    found = {
        name: np.quantile(each, [1 / 3, 1 / 2, 2 / 3]) for name, each in values.items() if each
    }
    return {name: each.tolist() for name, each in found.items()}


def caption(figures: Mapping[str, Any], thirds: Thirds) -> str:
    """The phrase of a recording with these figures in a collection with these thirds, such as "a low voice, speaking fast,
    quiet, with some background noise". What is not measured, or not heard, is not said."""
    said = {name: _word(figures, name, thirds) for name in _SCALES}
    kind = ", ".join(filter(None, (said["pitch"], said["pitch_range"])))
    parts = [f"a {kind} voice" if kind else "a voice", said["chars_per_second"], said["loudness"]]
    snr_db, bandwidth = _number(figures, "snr_db"), _number(figures, "bandwidth")
    if snr_db is not None:
        parts.append(next((words for limit, words in _NOISE if snr_db < limit), ""))
    if bandwidth and bandwidth < _TELEPHONE_HZ:
        parts.append("over a telephone")
    return ", ".join(filter(None, parts))


def _word(figures: Mapping[str, Any], name: str, thirds: Thirds) -> str:
    value, scale = _decibels(figures, name), _SCALES[name]
    if value is None or name not in thirds:
        return ""
    low, median, high = thirds[name]
    if value <= min(low, median - scale.step):
        return scale.below
    return scale.above if value >= max(high, median + scale.step) else ""


def _decibels(figures: Mapping[str, Any], name: str) -> float | None:
    value = _number(figures, name)
    if value is None or name == "loudness":
        return value
    return 20 * math.log10(max(value, 1e-3))


def _number(figures: Mapping[str, Any], name: str) -> float | None:
    """A figure; None where it is none, as in what a person may have edited."""
    value = figures.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return value if abs(value) < _LARGEST else None  # not NaN

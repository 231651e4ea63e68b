"""Figures of a segment's quality, the label made from them, and the weights of speakers."""

from dataclasses import dataclass

import numpy as np

from titan_tts.prepare.processing import SILENCE_LUFS, loudness
from torchtitan.models.dit_tts.speech.scoring.word_errors import WITHOUT_BLANKS, language_code

LABELS = ("high", "medium", "low")
MAX_SNR_DB = 100.0
"""Also of speech whose pauses are digital silence"""

_NEAR = 500  # frames of 10 ms before and after a segment whose pauses tell its noise
_EDGE = 10  # frames next to speech that are taken for neither: the detector is that exact
_MIN_FRAMES, _MAX_FRAMES = 10, 100  # of pauses: fewer tell nothing, and the nearest tell most
_QUIET_PERCENTILE = 5.0


@dataclass(frozen=True)
class Bounds:
    """What a segment must reach for a label. A figure that was not measured (None) is within no bounds of "high" where
    it says whether the text is right, and within all where it says something else."""

    agreement: float
    snr_db: float
    clipped: float
    overlap: float
    chars_per_second: tuple[float, float]
    chars_per_second_without_blanks: tuple[float, float]  # Chinese, Japanese, Thai ...


HIGH = Bounds(0.9, 20.0, 0.001, 0.1, (6.0, 25.0), (2.0, 10.0))
MEDIUM = Bounds(0.6, 5.0, 0.01, 0.5, (3.0, 35.0), (1.0, 15.0))
"""Segments within HIGH are "high", others within MEDIUM "medium", the rest "low"."""


def label(
    text: str,
    language: str,
    agreement: float | None,
    snr_db: float,
    clipped: float,
    chars_per_second: float,
    overlap: float | None,
) -> str:
    """One of LABELS; a segment without a text is "low", and one whose text nothing confirms at most "medium"."""

    def within(bounds: Bounds) -> bool:
        low, high = bounds.chars_per_second
        if language_code(language) in WITHOUT_BLANKS:
            low, high = bounds.chars_per_second_without_blanks
        return (
            (agreement is None or agreement >= bounds.agreement)
            and snr_db >= bounds.snr_db
            and clipped <= bounds.clipped
            and low <= chars_per_second <= high
            and (overlap is None or overlap <= bounds.overlap)
        )

    if text.strip() and agreement is not None and within(HIGH):
        return "high"
    return "medium" if text.strip() and within(MEDIUM) else "low"


def chars_per_second(text: str, seconds: float) -> float:
    return len(text.strip()) / seconds


def loudness_lufs(waveform: np.ndarray, rate: int) -> float:
    """Integrated loudness of (samples,), at least -70 LUFS."""
    return max(SILENCE_LUFS, loudness(waveform, rate))


class NoiseFloor:
    """Speech against noise in a recording.

    SNR = 10 log10((S - N) / N): S is the mean power of a segment's speech, noise included, and N the median power of
    the second of pauses that is nearest to it, up to 5 s away, or, without pauses, the power below which 5 % of its frames lie, which
    tells too low an SNR rather than one too high.
    """

    def __init__(self, power: np.ndarray, regions: np.ndarray) -> None:
        """power: (frames,) mean square of 10 ms; regions: (n, 2) speech in ms."""
        self.power = power.astype(np.float64)
        self.speech = _mask(len(power), regions // 10)
        wider = regions // 10 + np.array([-_EDGE, _EDGE])
        self.pause = ~_mask(len(power), wider)

    def snr_db(self, start: int, stop: int) -> float:
        """Of the segment from `start` to `stop` in ms; from -MAX_SNR_DB to MAX_SNR_DB."""
        first, last = start // 10, stop // 10
        inside = self.power[first:last]
        speech = inside[self.speech[first:last]]
        if not len(speech):
            return -MAX_SNR_DB
        near = max(0, first - _NEAR)
        frames = near + np.flatnonzero(self.pause[near : last + _NEAR])
        away = np.maximum(first - frames, frames - last + 1).clip(0)
        pauses = self.power[frames[np.argsort(away, kind="stable")[:_MAX_FRAMES]]]
        noise = (
            np.median(pauses)
            if len(pauses) >= _MIN_FRAMES
            else np.percentile(inside, _QUIET_PERCENTILE)
        )
        ratio = max(float(speech.mean() - noise), 0.0) / max(float(noise), 1e-20)
        return float(np.clip(10 * np.log10(max(ratio, 1e-20)), -MAX_SNR_DB, MAX_SNR_DB))


def _mask(frames: int, spans: np.ndarray) -> np.ndarray:
    """(frames,) bool: which lie in one of the spans (n, 2)."""
    mask = np.zeros(frames, bool)
    for start, stop in spans.tolist():
        mask[max(0, start) : stop] = True
    return mask


def speaker_weights(labels: np.ndarray) -> np.ndarray:
    """(n,) weight of each segment, of mean 1: one over the square root of the number of its speaker's segments.

    A speaker with a hundred times the segments is then drawn ten times as often, instead of a hundred times. It has
    no parameter to choose; `[data] balance_by = "speaker"` has one, and comes on top of it.
    """
    if not len(labels):
        return np.zeros(0)
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights = 1 / np.sqrt(counts)[classes]
    return weights / weights.mean()

"""Figures of a segment and the label made from them, its noise, and the weights of speakers."""

from dataclasses import dataclass

import numpy as np

from titan_tts.collect.transcripts import Transcript
from torchtitan.models.dit_tts.speech.scoring.word_errors import WITHOUT_BLANKS, language_code

MIN_CONFIDENCE = 0.4
"""Of a text that no other confirms. Whisper tiny.en has less in 91 % of French, Italian and Spanish segments, to which
it gives English texts, and in 3 % of English ones"""

MAX_SNR_DB = 100.0
"""Also of speech whose pauses are digital silence"""

_NEAR = 500  # frames of 10 ms before and after a segment whose pauses tell its noise
_EDGE = 10  # frames next to speech that are taken for neither: the detector is that exact
_MIN_FRAMES, _MAX_FRAMES = 10, 100  # of pauses: fewer tell nothing, and the nearest tell most
_QUIET_PERCENTILE = 5.0


@dataclass(frozen=True)
class Bounds:
    """Minimum agreement and SNR, maximum clipped fraction and overlap, range of the characters per second."""

    agreement: float
    snr_db: float
    clipped: float
    overlap: float
    chars_per_second: tuple[float, float]
    without_blanks: tuple[float, float]  # the same of Chinese, Japanese, Thai ...


HIGH = Bounds(0.9, 20.0, 0.001, 0.1, (6.0, 25.0), (2.0, 10.0))
MEDIUM = Bounds(0.6, 5.0, 0.01, 0.5, (3.0, 35.0), (1.0, 15.0))


@dataclass(frozen=True, kw_only=True)
class Figures(Transcript):
    """What was heard in a segment and measured of it."""

    snr_db: float
    clipped: float  # fraction of the samples at full scale, of all channels
    loudness: float  # LUFS, at least -70
    chars_per_second: float
    overlap: float | None  # fraction with two voices at once; None: not measured

    @property
    def quality(self) -> str:
        """A text that no other confirms is at most "medium"; an overlap that was not measured changes nothing."""
        if self.text and self.agreement is not None and self._within(HIGH):
            return "high"
        return "medium" if self.text and self._within(MEDIUM) else "low"

    def _within(self, bounds: Bounds) -> bool:
        without_blanks = language_code(self.language) in WITHOUT_BLANKS
        low, high = bounds.without_blanks if without_blanks else bounds.chars_per_second
        confirmed = self.confidence is None or self.confidence >= MIN_CONFIDENCE
        if self.agreement is not None:
            confirmed = self.agreement >= bounds.agreement
        return (
            confirmed
            and self.snr_db >= bounds.snr_db
            and self.clipped <= bounds.clipped
            and low <= self.chars_per_second <= high
            and (self.overlap is None or self.overlap <= bounds.overlap)
        )


class NoiseFloor:
    """SNR = 10 log10((S - N) / N): S is the mean power of a segment's speech, noise included, and N the median power of
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
        noise = np.percentile(inside, _QUIET_PERCENTILE)
        if len(pauses) >= _MIN_FRAMES:
            noise = np.median(pauses)
        ratio = max(float(speech.mean() - noise), 0.0) / max(float(noise), 1e-20)
        return float(np.clip(10 * np.log10(max(ratio, 1e-20)), -MAX_SNR_DB, MAX_SNR_DB))


def _mask(frames: int, spans: np.ndarray) -> np.ndarray:
    """(frames,) bool: which lie in one of the spans (n, 2)."""
    mask = np.zeros(frames, bool)
    for start, stop in spans.tolist():
        mask[max(0, start) : stop] = True
    return mask


def speaker_weights(labels: np.ndarray) -> np.ndarray:
    """(n,) weight of each segment, of mean 1: one over the square root of the number of its speaker's segments, so
    that who has a hundred times as many is drawn ten times as often."""
    if not len(labels):
        return np.zeros(0)
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights = 1 / np.sqrt(counts)[classes]
    return weights / weights.mean()

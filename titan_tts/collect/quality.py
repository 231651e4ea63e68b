"""The label of a segment by its figures, and its noise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.speech.scoring.word_errors import WITHOUT_BLANKS, language_code

MIN_CONFIDENCE = 0.4
"""Minimum confidence of a text that no other confirms. Whisper tiny.en has less in 91 % of French, Italian and Spanish segments, to which
it gives English texts, and in 3 % of English ones"""

MAX_SNR_DB = 100.0
"""Upper limit of the SNR, also the value of speech whose pauses are digital silence"""

_NEAR = 500  # frames of 10 ms before and after a segment whose pauses tell its noise
_EDGE = 10  # frames next to speech that are taken for neither: the detector is that exact
_MIN_FRAMES, _MAX_FRAMES = 10, 100  # of pauses: fewer tell nothing, and the nearest tell most
_QUIET_PERCENTILE = 5.0


@dataclass(frozen=True)
class Bounds:
    """Minimum agreement and SNR, maximum clipped fraction, range of the characters per second."""

    agreement: float
    snr_db: float
    clipped: float
    chars_per_second: tuple[float, float]
    without_blanks: tuple[float, float]  # the same of Chinese, Japanese, Thai ...


HIGH = Bounds(0.9, 20.0, 0.001, (6.0, 25.0), (2.0, 10.0))
MEDIUM = Bounds(0.6, 5.0, 0.01, (3.0, 35.0), (1.0, 15.0))


def quality(figures: Mapping[str, Any]) -> str:
    """high, medium or low, by the figures of a row of collection.jsonl, and the confidence of its text if that is told. A
    text that no other confirms is at most medium."""
    if figures["text"] and figures["agreement"] is not None and _within(figures, HIGH):
        return "high"
    return "medium" if figures["text"] and _within(figures, MEDIUM) else "low"


def _within(figures: Mapping[str, Any], bounds: Bounds) -> bool:
    without_blanks = language_code(figures["language"]) in WITHOUT_BLANKS
    low, high = bounds.without_blanks if without_blanks else bounds.chars_per_second
    confirmed, least = figures["agreement"], bounds.agreement
    if confirmed is None:
        confirmed, least = figures.get("confidence"), MIN_CONFIDENCE
    return (
        (confirmed is None or confirmed >= least)
        and figures["snr_db"] >= bounds.snr_db
        and figures["clipped"] <= bounds.clipped
        and low <= figures["chars_per_second"] <= high
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
        """Return the SNR in dB, from -MAX_SNR_DB to MAX_SNR_DB, of the segment from `start` to `stop` in ms."""
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

"""Intervals of error rates and means by the bootstrap over utterances, and of differences.

An utterance with all its noise seeds is the unit that is drawn (Bisani & Ney 2004 for word error
rates; Field & Welsh 2007 for units of several measurements). The noise of a request is keyed by seed
and content, so a seed has nothing in common over utterances: what differs between seeds already
makes the utterances' sums scatter, and drawing seeds as well would count it twice. Two systems are
compared utterance by utterance, since a hard text is hard for both.

The percentiles follow Hesterberg (2015), section 4.4: wider by the factor of Student's
distribution and the bias of the standard deviation, since plain ones are too narrow below about 50 utterances.
The intervals speak of other texts in the same voices, not of other voices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
_BLOCK = 1 << 22  # drawn indices at a time
_NAN = float("nan")

Values = np.ndarray | Sequence[float | None] | Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; NaN where there are no words or values, or a single utterance."""

    value: float
    low: float
    high: float

    @property
    def is_tie(self) -> bool:
        """True for a difference whose interval does not exclude 0."""
        return not (self.low > 0 or self.high < 0)


def rate_interval(
    errors: Values, counts: Values, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Errors per count over all utterances together, such as a word error rate.

    Args:
        errors: (utterances,) or (seeds, utterances).
        counts: words of the texts, of the same shape or (utterances,).

    Without any error the upper limit is 3 / words of one seed (the "rule of three").
    """
    errors, counts = _by_utterance(errors, counts)
    found = _bootstrap([(errors.sum(0), counts.sum(0))], seed, resamples)
    if errors.size and errors.sum() == 0 and len(errors.T) > 1:
        words = counts.sum() / len(counts)
        return Interval(found.value, found.low, min(1.0, 3 / words) if words else _NAN)
    return found


def mean_interval(values: Values, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Mean of values (utterances,) or (seeds, utterances), without None and NaN."""
    sums, counts = _by_utterance(values, None)
    return _bootstrap([(sums.sum(0), counts.sum(0))], seed, resamples)


def difference(
    first: Values,
    second: Values,
    counts: Values | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """The first system's rate or mean minus the second's; `is_tie` where 0 lies in the interval.

    Args:
        first, second: values of two systems for the same utterances, (utterances,) or
            (seeds, utterances); they may have different numbers of seeds.
        counts: (utterances,) words of the texts for rates; None for means, of which an utterance
            that either system lacks is left out.
    """
    systems = [_by_utterance(values, counts) for values in (first, second)]
    parts = [(values.sum(0), count.sum(0)) for values, count in systems]
    if counts is None:
        both = (parts[0][1] > 0) & (parts[1][1] > 0)
        parts = [(values[both], count[both]) for values, count in parts]
    return _bootstrap(parts, seed, resamples)


def _by_utterance(values: Values, counts: Values | None) -> tuple[np.ndarray, np.ndarray]:
    """(seeds, utterances) of sums and of their divisors; 0 and 0 where a value is missing."""
    found = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if counts is None:
        return np.nan_to_num(found), np.isfinite(found).astype(np.float64)
    return found, np.broadcast_to(np.asarray(counts, dtype=np.float64), found.shape)


def _bootstrap(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], seed: int, resamples: int
) -> Interval:
    """Interval of the first part's sum / count, minus the second part's if there is one; (utterances,) each."""
    utterances = len(parts[0][0])
    value = float(_statistic(parts, np.arange(utterances)[None])[0])
    if utterances < 2 or math.isnan(value):
        return Interval(value, _NAN, _NAN)
    generator = np.random.default_rng(seed)
    blocks = []
    rows = max(1, _BLOCK // utterances)
    for start in range(0, resamples, rows):
        size = (min(rows, resamples - start), utterances)
        blocks.append(_statistic(parts, generator.integers(0, utterances, size)))
    # Draws without a single word have no rate.
    tail = _tail(utterances)
    low, high = np.nanquantile(np.concatenate(blocks), [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def _statistic(parts: Sequence[tuple[np.ndarray, np.ndarray]], drawn: np.ndarray) -> np.ndarray:
    """(draws,) of the statistic for drawn utterances (draws, utterances)."""
    rates = []
    for sums, counts in parts:
        count = counts[drawn].sum(1)
        rates.append(np.where(count > 0, sums[drawn].sum(1) / np.maximum(count, 1e-300), _NAN))
    return rates[0] if len(rates) == 1 else rates[0] - rates[1]


def _tail(count: int) -> float:
    """Fraction of the draws below the interval."""
    normal, freedom = NormalDist(), count - 1
    z = normal.inv_cdf(0.5 + CONFIDENCE / 2)
    # Student's quantile, by the first terms of its expansion (Abramowitz & Stegun 26.7.5).
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return normal.cdf(-math.sqrt(count / freedom) * t)

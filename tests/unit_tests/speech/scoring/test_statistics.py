"""Intervals hold the truth about as often as they say, and differences are compared in pairs."""

import math

import numpy as np
import pytest

from torchtitan.models.dit_tts.speech.scoring.statistics import (
    Interval,
    difference,
    mean_interval,
    rate_interval,
)


@pytest.mark.parametrize("utterances", [8, 40])
def test_intervals_hold_the_truth_about_as_often_as_they_say(utterances):
    """Two seeds of an utterance are alike: a hard text, and noise of each seed."""
    generator, count = np.random.default_rng(0), 300
    words, hits = generator.integers(3, 12, utterances), np.zeros(3)
    for _ in range(count):
        hard = generator.normal(0, 1, utterances)
        one, other = (hard + generator.normal(0, 0.7, (2, utterances)) for _ in range(2))
        errors = generator.poisson(generator.gamma(2.0, 0.05, utterances) * words, (2, utterances))
        found = (
            (0.0, mean_interval(one, resamples=300)),
            (0.1, difference(one, other - 0.1, resamples=300)),
            (0.1, rate_interval(errors, words, resamples=300)),
        )
        hits += [each.low <= truth <= each.high for truth, each in found]
    assert (0.90 <= hits / count).all() and (hits / count <= 0.99).all(), hits


def test_values():
    # The same errors in ten seeds are not ten times as certain.
    errors, words = np.array([0, 3, 1, 0, 0, 2, 5, 0]), np.array([4, 6, 5, 4, 6, 7, 9, 5])
    one, ten = rate_interval(errors, words), rate_interval(np.tile(errors, (10, 1)), words)
    assert one == ten and one.value == pytest.approx(11 / 46)
    assert 0 <= one.low < 0.12 < 0.35 < one.high < 0.6
    assert rate_interval([1, 1, 0], [1, 2, 7]).value == 0.2  # not the mean of the rates
    assert rate_interval([[1, 1, 0], [3, 1, 0]], [[1, 2, 7], [1, 2, 7]]).value == 0.3
    assert mean_interval([1.0, None, 4.0, float("nan")]).value == 2.5
    assert mean_interval([[1.0, 2.0], [3.0, None]]).value == 2.0
    assert difference([4, 1], [1, 1], counts=[10, 20]).value == pytest.approx(0.1)
    assert difference([[4, 1], [0, 1]], [1, 1], counts=[10, 20]).value == pytest.approx(1 / 30)
    assert difference([3.0, 9.0, None], [1.0, None, 5.0]).value == 2.0
    assert mean_interval([1.0, 2.0, 5.0], seed=3) == mean_interval([1.0, 2.0, 5.0], seed=3)


def test_ties():
    """Pairs show a small difference that lies deep within the scatter of the texts."""
    generator = np.random.default_rng(1)
    hard = generator.normal(0, 1, 60)
    better = hard - 0.05 + generator.normal(0, 0.02, 60)
    found = difference(hard, better)
    assert not found.is_tie and found.value == pytest.approx(0.05, abs=0.01)
    assert not difference(better, hard).is_tie and difference(better, hard).high < 0
    assert mean_interval(hard).high > mean_interval(better).low
    assert difference(hard, hard + generator.normal(0, 1, 60)).is_tie
    assert difference(hard, hard) == Interval(0.0, 0.0, 0.0) and difference(hard, hard).is_tie


def test_too_little_for_an_interval():
    assert rate_interval([0] * 30, [5] * 30) == Interval(0.0, 0.0, 3 / 150)
    assert rate_interval(np.zeros((4, 30)), [5] * 30).high == 3 / 150  # the same texts in each seed
    for found in (rate_interval([1], [4]), mean_interval([0.25])):
        assert found.value == 0.25 and math.isnan(found.low) and math.isnan(found.high)
    for found in (
        rate_interval([], []),
        rate_interval([0, 0], [0, 0]),
        mean_interval([None, None]),
        mean_interval([]),
        difference([1.0, None], [None, 2.0]),
        difference([1, 1], [1, 0], counts=[0, 0]),
    ):
        assert math.isnan(found.value) and math.isnan(found.low) and found.is_tie
    # Some draws have no words at all.
    assert 0 < rate_interval([1, 0, 0, 0], [2, 0, 0, 0]).value == 0.5

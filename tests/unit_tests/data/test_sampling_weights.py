"""Mixing and balancing: the distribution that is drawn is the one that was asked for."""

from collections import Counter

import numpy as np
import pytest

from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.batch_sampler import WEIGHT_BITS, GlobalBatchSampler
from torchtitan.models.dit_tts.data.sampling_weights import draws_per_epoch

ONE = 1 << WEIGHT_BITS


def draws(source, codes=None, frames=None, **settings):
    source = np.asarray(source)
    data = Data(path=[f"d{number}" for number in range(source.max() + 1)], **settings)
    return draws_per_epoch(data, source, np.ones(len(source)) if frames is None else frames, codes)


def drawn(order, epochs):
    """Times that each sample comes in so many epochs."""
    counts = Counter()
    for number in range(order.batches_before_epoch(epochs)):
        counts.update(order.batch(number).samples.tolist())
    return counts


def test_nothing_asked_is_every_sample_once():
    assert draws([0, 0, 1]) is None
    plain = GlobalBatchSampler([np.arange(50)], [8], 3)
    ones = GlobalBatchSampler([np.arange(50)], [8], 3, [np.full(50, ONE)])
    assert plain.samples_fingerprint() == ones.samples_fingerprint()
    for number in range(40):
        assert (plain.batch(number).samples == ones.batch(number).samples).all()


def test_datasets_are_mixed_by_weight():
    source = np.repeat([0, 1], [300, 100])
    weights = draws(source, weights=[1, 3])
    assert weights.sum() == pytest.approx(400 * ONE, abs=400)
    refused(lambda: draws([1, 1], weights=[2, 3]), "gives 2 to 'd0', of which no sample")
    order = GlobalBatchSampler([np.arange(400)], [8], 0, [weights])
    counts = drawn(order, 12)
    totals = [sum(counts[i] for i in np.flatnonzero(source == d)) for d in (0, 1)]
    assert totals[1] / sum(totals) == pytest.approx(0.75, abs=0.01)
    # Within a dataset all samples come equally often: no sample is ever two draws ahead.
    for dataset in (0, 1):
        times = [counts[i] for i in np.flatnonzero(source == dataset)]
        assert max(times) - min(times) <= 2


def test_balanced_classes_follow_the_effective_number():
    codes = np.repeat([0, 1, -1], [900, 90, 10])
    for beta in (0.0, 0.99, 0.9999999):
        weights = draws(np.zeros(1000, int), codes=codes, balance_beta=beta) / ONE
        fraction = np.array([weights[codes == code].sum() for code in (0, 1, -1)]) / weights.sum()
        n = np.array([900, 90, 10])
        wanted = n * ((1 - beta) / (1 - beta**n))
        np.testing.assert_allclose(fraction, wanted / wanted.sum(), atol=1e-4)
    np.testing.assert_allclose(fraction, 1 / 3, atol=1e-3)  # towards 1 the classes are equal


def test_durations_are_drawn_by_their_power():
    seconds = np.repeat([2.0, 8.0], 500)
    settings = {"duration_alpha": 0.5, "duration_offset_seconds": 1.0, "frames_per_second": 12.5}
    weights = draws(np.zeros(1000, int), frames=12.5 * seconds, **settings) / ONE
    assert weights[-1] / weights[0] == pytest.approx(np.sqrt(9 / 3), abs=1e-3)
    assert weights.mean() == pytest.approx(1, abs=1e-4)


def test_epochs_of_a_weighted_order_hold_what_the_weights_ask():
    rng = np.random.default_rng(0)
    buckets = [np.arange(0, 70), np.arange(70, 100), np.arange(100, 104)]
    weights = [rng.integers(1, 3 * ONE, len(samples)) for samples in buckets]
    weighted = GlobalBatchSampler(buckets, [8, 8, 16], 5, weights)
    sequential = [weighted.batch(k) for k in range(300)]
    assert [b.epoch for b in sequential] == sorted(b.epoch for b in sequential)
    counts = Counter(s for b in sequential for s in b.samples.tolist())
    epochs = sequential[-1].epoch
    for samples, weight in zip(buckets[:2], weights[:2]):
        for sample, w in zip(samples.tolist(), weight.tolist()):
            assert abs(counts[sample] - epochs * w / ONE) <= 2 + w / ONE
    plain = GlobalBatchSampler(buckets, [8, 8, 16], 5)
    assert weighted.samples_fingerprint() != plain.samples_fingerprint()

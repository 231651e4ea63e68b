"""The order of batches, the buckets and the weights of samples: pure functions with properties that can be counted."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from tests.helpers.loaders import order_digest
from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.batch_sampler import (
    WEIGHT_BITS,
    GlobalBatchSampler,
    seeded_permutation,
)
from torchtitan.models.dit_tts.data.buckets import choose_edges, make_batch_policy, select_samples
from torchtitan.models.dit_tts.data.sampling_weights import draws_per_epoch

BUCKETS = [np.arange(0, 50), np.arange(50, 173), np.arange(173, 180), np.empty(0, np.int64)]
SIZES = [24, 16, 8, 8]


def order(seed=0):
    return GlobalBatchSampler(BUCKETS, SIZES, seed)


def test_every_sample_once_an_epoch():
    made = order()
    # 48 epochs end with a batch in every bucket: 50*48/24, 123*48/16 and 7*48/8 batches.
    total = made.batches_before_epoch(48)
    taken = [made.batch(k) for k in range(total)]
    counts = Counter(sample for batch in taken for sample in batch.samples.tolist())
    assert set(counts.values()) == {48} and len(counts) == 180
    for batch in taken:
        assert len(batch.samples) == SIZES[batch.bucket] and batch.samples.dtype == np.int64
        assert np.isin(batch.samples, BUCKETS[batch.bucket]).all()
    # A pass that has ended has had every sample once: no sample is ever two passes ahead.
    for epoch in (1, 7, 30):
        counts = Counter(
            s for b in taken[: made.batches_before_epoch(epoch)] for s in b.samples.tolist()
        )
        for bucket, size in zip(BUCKETS, SIZES):
            for sample in bucket.tolist():
                assert epoch - -(-size // len(bucket)) <= counts[sample] <= epoch


def test_the_order_is_pinned():
    """A resume months later must find the same order: these numbers may never change."""
    assert seeded_permutation(8, (0, 0, 0)).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert seeded_permutation(5, (2**40, 3, 2**32 - 1)).tolist() == [0, 3, 2, 1, 4]
    assert order_digest(order(), 300) == "308639f03a049b3c"
    assert order().samples_fingerprint() == "8f42355498894c8d"
    weights = [np.linspace(1, 3 << WEIGHT_BITS, len(samples)).astype(int) for samples in BUCKETS]
    weighted = GlobalBatchSampler(BUCKETS, SIZES, 5, weights)
    assert order_digest(weighted, 300) == "fe92a57b74073345"
    assert weighted.samples_fingerprint() == "82a41dcc70b28411"
    assert order().bucket_batches_per_epoch == [50 / 24, 123 / 16, 7 / 8, 0]
    halves = [np.array([1, 2]) << 15, np.array([3]) << 15]
    half = GlobalBatchSampler([np.arange(2), np.array([2])], [2, 4], 0, halves)
    assert half.batches_per_epoch == 1.5 / 2 + 1.5 / 4


def policy(frames, **changes):
    frames = np.asarray(frames)
    reference = changes.pop("reference_frames", np.full(len(frames), 50))
    text = changes.pop("text_tokens", frames // 2 + 2)
    draws = changes.pop("draws", None)
    limits = {"max_frames": 768, "max_speaker_frames": 384, "max_text_tokens": 192}
    data = Data(**limits, **changes)
    return make_batch_policy(data, 16, frames, reference, text, draws)


def test_chosen_edges_are_the_best():
    frames = np.random.default_rng(0).integers(1, 120, 200)
    edges = choose_edges(frames, 3, 768)
    rounded = -(-frames // 8) * 8
    assert all(edge % 8 == 0 for edge in edges) and edges == sorted(edges)
    *inner, longest = np.unique(rounded).tolist()

    def padded(edges):
        return np.array(edges)[np.searchsorted(edges, frames)].sum()

    assert padded(edges) == min(padded([*pair, longest]) for pair in combinations(inner, 2))
    assert choose_edges(np.array([5, 6, 7]), 8, 768) == [8]
    assert choose_edges(np.array([97, 100]), 8, 100) == [100]
    # Two 16 and one 80 are 112 frames, one 8 and two 80 are 168; drawn often, the first decides.
    for draws, best in ((None, (16, 80)), (np.array([100, 1, 1]), (8, 80))):
        assert policy([8, 16, 80], num_buckets=2, draws=draws).edges == best


def test_policy_shapes_and_sizes():
    frames = np.clip(np.random.default_rng(1).lognormal(5, 0.6, 5000), 10, 768).astype(int)
    made = policy(frames, num_buckets=6)
    assert len(made.edges) == 6 and made.batch_sizes[-1] == 16 and made.useful_fraction > 0.8
    assert made == policy(frames, num_buckets=6)
    assert sum(made.sample_counts) == 5000
    bucket = made.bucket_of(frames)
    for number, ((T, L, R), size) in enumerate(zip(made.shapes, made.batch_sizes)):
        assert size == max(8, 16 * made.edges[-1] // made.edges[number] // 8 * 8)
        assert frames[bucket == number].max() <= T == made.edges[number]
        assert L == min(192, -(-((frames[bucket == number] // 2).max() + 2) // 8) * 8)
        assert R == 64  # a multiple of 8 speaker patches of 4 frames
    assert policy([100], reference_frames=np.array([900])).shapes[0][2] == 384
    drawn = policy([100], reference_frames=np.array([9]), references="drawn")
    assert drawn.shapes[0][2] == 384 and drawn.useful_reference_fraction == 192.5 / 384
    with pytest.raises(ValueError, match="ends at 50 frames but a sample within max_frames"):
        policy([20, 100], bucket_frames=[50])
    # The longest reference has its place, in multiples of 8 speaker patches.
    assert policy([100] * 3, reference_frames=np.array([10, 20, 150])).shapes[0][2] == 160


def test_references_get_lengths_of_their_own():
    """At most a multiple of the bucket's own frames, in blocks of 8 speaker patches; the longest bucket
    keeps all, also where the edges go beyond the data."""
    settings = dict(
        bucket_frames=[40, 120, 200, 768],
        text_tokens=np.array([16, 4, 16, 16]),
        reference_frames=np.array([20, 400, 170, 400]),
    )

    def lengths(frames=(30, 32, 100, 200), **changes):
        return [R for _, _, R in policy(frames, **{**settings, **changes}).shapes]

    assert lengths() == [64, 128, 384, 32]
    assert lengths(max_reference_ratio=0.25) == [32, 32, 384, 32]
    assert lengths(max_reference_ratio=0.01) == [32, 32, 384, 32]
    assert lengths(max_reference_ratio=0.0) == [384, 192, 384, 32]
    assert lengths(frames=(30, 32, 100, 400)) == [64, 128, 32, 384]
    made = policy((30, 32, 100, 200), **settings, draws=np.array([3, 1, 1, 1]))
    assert made.useful_text_fraction == pytest.approx((3 * 16 + 4 + 16 + 16) / (6 * 16))
    padded = 4 * 64 + 128 + 384
    assert made.useful_reference_fraction == pytest.approx((3 * 20 + 64 + 128 + 384) / padded)


def test_selection():
    frames, text = np.array([10, 900, 20, 768]), np.array([12, 12, 502, 192])

    def select(samples=slice(None)):
        data = Data(max_frames=768, max_text_tokens=192)
        return select_samples(frames[samples], text[samples], data)

    kept = select()
    assert (kept.samples.tolist(), kept.frames.tolist()) == ([0, 3], [10, 768])
    assert (kept.too_long, kept.too_much_text) == (1, 1)
    with pytest.raises(ValueError, match="none of the 1 samples .* --data.max_frames 904$"):
        select(slice(1, 2))


ONE = 1 << WEIGHT_BITS


def draws(source, codes=None, frames=None, **settings):
    source = np.asarray(source)
    data = Data(path=[f"d{number}" for number in range(source.max() + 1)], **settings)
    return draws_per_epoch(data, source, np.ones(len(source)) if frames is None else frames, codes)


def test_datasets_are_mixed_by_weight():
    source = np.repeat([0, 1], [300, 100])
    weights = draws(source, weights=[1, 3])
    assert weights.sum() == pytest.approx(400 * ONE, abs=400)
    refused(lambda: draws([1, 1], weights=[2, 3]), "gives 2 to 'd0', of which no sample")
    order = GlobalBatchSampler([np.arange(400)], [8], 0, [weights])
    batches = map(order.batch, range(order.batches_before_epoch(12)))
    counts = Counter(sample for batch in batches for sample in batch.samples.tolist())
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
    seconds, source = np.tile([2.0, 8.0], 500), np.repeat([0, 1], [900, 100])
    settings = {"duration_alpha": 0.5, "frames_per_second": 12.5}
    weights = draws(source, frames=12.5 * seconds, **settings) / ONE
    assert weights[-1] / weights[-2] == pytest.approx(np.sqrt(8 / 2), abs=1e-3)
    for dataset in (0, 1):  # without weights as many draws as samples
        assert weights[source == dataset].mean() == pytest.approx(1, abs=1e-4)

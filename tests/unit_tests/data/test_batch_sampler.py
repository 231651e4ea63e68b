"""The order of batches and the buckets: pure functions with properties that can be counted."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.batch_sampler import (
    WEIGHT_BITS,
    GlobalBatch,
    GlobalBatchSampler,
    seeded_permutation,
)
from torchtitan.models.dit_tts.data.buckets import choose_edges, make_batch_policy, select_samples

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


@pytest.mark.parametrize("is_weighted", [False, True])
def test_random_access_equals_sequential(is_weighted):
    rng = np.random.default_rng(0)
    weights = [rng.integers(1, 3 << WEIGHT_BITS, len(samples)) for samples in BUCKETS]

    def make():
        return GlobalBatchSampler(BUCKETS, SIZES, 5, weights if is_weighted else None)

    made, other = make(), make()
    sequential = [made.batch(k) for k in range(400)]
    for k in [399, *rng.permutation(400).tolist()]:
        batch, wanted = other.batch(k), sequential[k]
        assert (batch.number, batch.epoch, batch.bucket) == (k, wanted.epoch, wanted.bucket)
        np.testing.assert_array_equal(batch.samples, wanted.samples)


def test_every_epoch_and_seed_is_another_permutation_of_the_same_samples():
    """The batch size divides the samples of each bucket, so no batch spans two epochs."""
    buckets = [np.arange(0, 48), np.arange(48, 96)]
    together, sequences = [], []
    for seed in (0, 1):
        made = GlobalBatchSampler(buckets, [4, 4], seed)
        for epoch in range(4):
            batches = [made.batch(24 * epoch + k) for k in range(24)]
            samples = np.concatenate([batch.samples for batch in batches])
            assert sorted(samples.tolist()) == list(range(96))
            together.append({frozenset(batch.samples.tolist()) for batch in batches})
            sequences.append([batch.bucket for batch in batches])
    for i, j in combinations(range(8), 2):
        # Other samples meet in a batch, and short and long batches come in another order.
        assert len(together[i] & together[j]) <= 1
        assert sequences[i] != sequences[j]
    # An epoch does not begin with all short utterances.
    assert all(0 < sum(sequence[:12]) < 12 for sequence in sequences)


def test_the_order_is_pinned():
    """A resume months later must find the same order: these numbers may never change."""
    assert seeded_permutation(8, (0, 0, 0)).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert seeded_permutation(5, (2**40, 3, 2**32 - 1)).tolist() == [0, 3, 2, 1, 4]
    assert (order().crops(GlobalBatch(5, 0, 0, np.arange(3))) % 1000).tolist() == [266, 366, 851]
    assert sorted(seeded_permutation(1000, (5, 6, 7)).tolist()) == list(range(1000))
    batch = GlobalBatch(5, 0, 1, np.arange(2))
    words = [[538, 789, 372], [224, 200, 181]]
    assert (order().reference_words(batch, 3) % 1000).tolist() == words
    places = ((0, 0), (1, 0), (0, 1))
    assert [order().replacement(batch, *place) for place in places] == [130, 118, 146]
    assert order().batch(7).samples.tolist()[:6] == [54, 88, 170, 106, 105, 118]
    assert order().samples_fingerprint() == "8f42355498894c8d"
    weights = [np.linspace(1, 3 << WEIGHT_BITS, len(samples)).astype(int) for samples in BUCKETS]
    weighted = GlobalBatchSampler(BUCKETS, SIZES, 5, weights)
    assert weighted.batch(40).samples.tolist()[:6] == [142, 83, 114, 136, 153, 121]
    assert (weighted.batch(40).epoch, weighted.samples_fingerprint()) == (2, "82a41dcc70b28411")
    assert order().bucket_batches_per_epoch == [50 / 24, 123 / 16, 7 / 8, 0]
    halves = [np.array([1, 2]) << 15, np.array([3]) << 15]
    half = GlobalBatchSampler([np.arange(2), np.array([2])], [2, 4], 0, halves)
    assert half.batches_per_epoch == 1.5 / 2 + 1.5 / 4
    for seed in (-1, 2**63):
        refused(lambda: order(seed), f"seed = {seed}")


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


def test_crops_are_uniform_and_of_their_place():
    made, starts = order(seed=3), 7
    batches = [made.batch(number) for number in range(800)]
    drawn = np.concatenate([made.crops(batch) % starts for batch in batches])
    counts = np.bincount(drawn.astype(int), minlength=starts)
    assert len(counts) == starts and (abs(counts / len(drawn) * starts - 1) < 0.06).all()
    # Neither equal in two batches, nor of the seed, nor of what was asked before.
    first, second = made.crops(batches[0]), made.crops(batches[1])
    assert not np.isin(first, second).any() and not np.isin(first, order(4).crops(batches[0])).any()
    assert len(np.unique(first)) == len(first) == len(batches[0].samples)
    assert (order(seed=3).crops(batches[0]) == first).all()


def test_selection():
    frames, text = np.array([10, 900, 20, 768]), np.array([12, 12, 502, 192])

    def select(on_too_long, samples=slice(None)):
        return select_samples(
            frames[samples],
            text[samples],
            Data(on_too_long=on_too_long, max_frames=768, max_text_tokens=192),
            lambda sample: f"name{sample}",
        )

    dropped = select("drop")
    assert dropped.samples.tolist() == [0, 3]
    assert (dropped.too_long, dropped.too_much_text) == (1, 1)
    cropped = select("crop")
    assert cropped.samples.tolist() == [0, 1, 3] and cropped.frames.tolist() == [10, 768, 768]
    assert (cropped.too_long, cropped.cropped, cropped.too_much_text) == (0, 1, 1)
    with pytest.raises(ValueError, match="first is 'name1' with 900 .* 904 .*_tokens 504$"):
        select("error")
    with pytest.raises(ValueError, match="none of the 1 samples .* --data.max_frames 904$"):
        select("drop", slice(1, 2))

"""The order of training: which samples make up global batch number k, a pure function of (the samples of each bucket,
the batch sizes, the seed), so a run resumed on other machines sees the same batches.

**Streams.** Bucket b, of n_b samples, has an endless stream: a permutation of its samples for
epoch 0, another for epoch 1, and so on, each drawn from (seed, epoch, b). Its batch j takes the
stream's positions [j*G_b, (j+1)*G_b). A batch may straddle two passes, so no sample is left over
at the end of a pass and none comes twice within it.

**Epochs.** Batch j belongs to the epoch in which its last sample lies: epoch e has the batches
floor(e*n_b/G_b) ... floor((e+1)*n_b/G_b) - 1 of bucket b. The batches of all buckets of an epoch
are shuffled together, again by (seed, epoch). Hence the number of batches before epoch e is
C(e) = sum over b of floor(e*n_b/G_b), in closed form, and batch k is found by a search for e.

**Worked example.** Bucket 0 has samples 0..4 and G_0 = 2; bucket 1 has samples 5, 6 and G_1 = 4.

    stream 0:  3 0 1 4 2 | 2 4 0 3 1 | ...    batches [3 0] [1 4] [2 2] [4 0] [3 1] ...
    stream 1:  6 5 | 5 6 | 6 5 | ...          batches [6 5 5 6] ...
    batches up to the end of epoch 0: floor(5/2) + floor(2/4) = 2 + 0,  so C(1) = 2
    batches up to the end of epoch 1: floor(10/2) + floor(4/4) = 5 + 1, so C(2) = 6

Epoch 0 is global batches 0 and 1 (batches 0, 1 of bucket 0, shuffled); epoch 1 is global batches
2 to 5 (batches 2, 3, 4 of bucket 0 and batch 0 of bucket 1, shuffled). With very little data an
epoch may have no batch at all; the search steps over it.

**Weights.** Where samples are drawn unequally often, sample i comes w_i times per epoch: in epoch e

    floor((e+1)*w_i + u_i) - floor(e*w_i + u_i)    times,    u_i in [0, 1) drawn from (seed, i)

The samples of bucket b before epoch e are then N_b(e) = sum over i of floor(e*w_i + u_i) in place of e*n_b. Weights
are whole multiples of 2**-16, so all of this is integer arithmetic and the same on every machine.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from torchtitan.models.dit_tts.errors import InputError

# Third word of the shuffle's key, where the streams have their bucket number.
_SHUFFLE = 2**32 - 1
# Third words of the weights' offsets and of replacements are their bucket number plus one of these.
_OFFSETS, _REPLACEMENTS = 2**30, 2**31
_REFERENCES, _CROPS = 2**28, 2**29

ORDER_VERSION = 2
"""Bump when the batch order, or what is taken of its samples, changes for the same inputs."""

WEIGHT_BITS = 16
"""weights are integers in units of 2**-WEIGHT_BITS draws per epoch"""


@dataclass(frozen=True)
class GlobalBatch:
    """One step's samples: (G_b,) int64 numbers in row order, as global batch `number` of training, from 0. `starts`:
    (rows + 1,) where the rows of a packed batch begin in them; None: each sample is a row."""

    number: int
    epoch: int
    bucket: int
    samples: np.ndarray
    starts: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.samples) if self.starts is None else len(self.starts) - 1


class _Stream:
    """The endless stream of one bucket's samples, epoch after epoch."""

    def __init__(self, samples: np.ndarray, weights: np.ndarray | None, seed: int, bucket: int):
        self.samples = np.asarray(samples, dtype=np.int64)
        self._seed = seed
        self._bucket = bucket
        self._weights = None
        if weights is not None and (weights != 1 << WEIGHT_BITS).any():
            self._weights = np.asarray(weights, dtype=np.int64)
            random = _random_words((seed, 0, _OFFSETS + bucket), len(self.samples))
            self._offsets = (random >> np.uint64(64 - WEIGHT_BITS)).astype(np.int64)
        self._before: dict[int, int] = {0: 0}
        self._epoch = lru_cache(2)(self._permuted)  # a batch may straddle two

    @property
    def draws_per_epoch(self) -> float:
        if self._weights is None:
            return float(len(self.samples))
        return int(self._weights.sum()) / (1 << WEIGHT_BITS)

    def before_epoch(self, epoch: int) -> int:
        """N(e): positions of the epochs 0 .. e-1."""
        if self._weights is None:
            return epoch * len(self.samples)
        if epoch not in self._before:
            self._before[epoch] = int(self._drawn(epoch).sum())
        return self._before[epoch]

    def times(self, first: int, end: int) -> np.ndarray:
        """(n,) int64, how often each sample comes in the epochs first .. end-1."""
        if self._weights is None:
            return np.full(len(self.samples), end - first)
        return self._drawn(end) - self._drawn(first)

    def _drawn(self, epoch: int) -> np.ndarray:
        """Times that each sample comes in the epochs 0 .. e-1."""
        assert self._weights is not None
        return (epoch * self._weights + self._offsets) >> WEIGHT_BITS

    def rows(self, start: int, stop: int, epoch: int) -> np.ndarray:
        """Rows of `samples` at the positions [start, stop), of which the last lies in `epoch`."""
        while self.before_epoch(epoch) > start:
            epoch -= 1
        parts = []
        while start < stop:
            first, end = self.before_epoch(epoch), self.before_epoch(epoch + 1)
            taken = max(0, min(stop, end) - start)
            parts.append(self._epoch(epoch)[start - first : start - first + taken])
            start, epoch = start + taken, epoch + 1
        return np.concatenate(parts)

    def _permuted(self, epoch: int) -> np.ndarray:
        """Rows of `samples` in the order of one epoch."""
        length = self.before_epoch(epoch + 1) - self.before_epoch(epoch)
        rows = seeded_permutation(length, (self._seed, epoch, self._bucket))
        if self._weights is None:
            return rows
        times = self.times(epoch, epoch + 1)
        return np.repeat(np.arange(len(times), dtype=rows.dtype), times)[rows]

    def draw(self, random: int) -> int:
        """A sample by its weight, from a random 64-bit number."""
        if self._weights is None:
            return int(self.samples[random % len(self.samples)])
        ends = np.cumsum(self._weights)
        return int(self.samples[np.searchsorted(ends, random % int(ends[-1]), side="right")])

    def fingerprint(self) -> bytes:
        digest = hashlib.sha256(self.samples.astype("<i8").tobytes())
        if self._weights is not None:
            digest.update(self._weights.astype("<i8").tobytes())
        return digest.digest()


class GlobalBatchSampler:
    """Random access to the endless sequence of global batches. Not thread-safe: it holds the permutations in use.

    Args:
        bucket_samples: for each bucket, the numbers of its samples; may be empty arrays.
        batch_sizes: samples in a global batch of each bucket.
        bucket_weights: for each bucket, how often each of its samples comes in an epoch, as int64
            in units of 2**-WEIGHT_BITS, at least 1; None: each once.
    """

    def __init__(
        self,
        bucket_samples: Sequence[np.ndarray],
        batch_sizes: Sequence[int],
        seed: int,
        bucket_weights: Sequence[np.ndarray] | None = None,
    ):
        assert len(bucket_samples) == len(batch_sizes) and all(size > 0 for size in batch_sizes)
        self.seed = seed
        self.batch_sizes = tuple(int(size) for size in batch_sizes)
        weights = bucket_weights if bucket_weights is not None else [None] * len(bucket_samples)
        self._streams = [
            _Stream(samples, weight, seed, bucket)
            for bucket, (samples, weight) in enumerate(zip(bucket_samples, weights, strict=True))
        ]
        if not any(len(stream.samples) for stream in self._streams):
            raise InputError("the order has no samples; every bucket is empty")
        self._shuffle = lru_cache(2)(self._shuffled)

    def samples_fingerprint(self) -> str:
        """Return a digest of the samples, their buckets and weights; file names do not count."""
        digest = hashlib.sha256()
        for stream in self._streams:
            digest.update(len(stream.samples).to_bytes(8, "little") + stream.fingerprint())
        return digest.hexdigest()[:16]

    def batches_before_epoch(self, epoch: int) -> int:
        """C(e): global batches of the epochs 0 .. e-1."""
        return sum(self._before_epoch(epoch))

    def _before_epoch(self, epoch: int) -> list[int]:
        """C(e) of each bucket."""
        return [
            stream.before_epoch(epoch) // size
            for stream, size in zip(self._streams, self.batch_sizes, strict=True)
        ]

    @property
    def batches_per_epoch(self) -> float:
        """Global batches per epoch, on average; below 1 where a batch is larger than the data."""
        return sum(self.bucket_batches_per_epoch)

    @property
    def bucket_batches_per_epoch(self) -> list[float]:
        """Average batches of each bucket."""
        return [
            stream.draws_per_epoch / size
            for stream, size in zip(self._streams, self.batch_sizes, strict=True)
        ]

    def epoch_of(self, number: int) -> int:
        """The epoch e with C(e) <= number < C(e+1)."""
        assert number >= 0
        above = 1
        while self.batches_before_epoch(above) <= number:
            above *= 2
        return bisect_right(range(above), number, key=self.batches_before_epoch) - 1

    def batch(self, number: int) -> GlobalBatch:
        """Global batch `number`; some microseconds, but at the first touch of an epoch."""
        epoch = self.epoch_of(number)
        firsts, lasts = self._before_epoch(epoch), self._before_epoch(epoch + 1)
        slot = int(self._shuffle(epoch, sum(lasts) - sum(firsts))[number - sum(firsts)])
        for bucket, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            if slot < last - first:
                break
            slot -= last - first
        size, stream = self.batch_sizes[bucket], self._streams[bucket]
        start = (first + slot) * size
        samples = stream.samples[stream.rows(start, start + size, epoch)]
        return GlobalBatch(number, epoch, bucket, samples)

    def replacement(self, batch: GlobalBatch, row: int, attempt: int) -> int:
        """A sample of the same bucket for a corrupt one; another for every attempt."""
        key = (self.seed, batch.number, _REPLACEMENTS + batch.bucket, row, attempt)
        return self._streams[batch.bucket].draw(int(_random_words(key, 1)[0]))

    def crops(self, batch: GlobalBatch) -> np.ndarray:
        """(G_b,) uint64, random: which part of its reference each row takes, where that is too long."""
        return _random_words((self.seed, batch.number, _CROPS), len(batch.samples))

    def reference_words(self, batch: GlobalBatch, count: int) -> np.ndarray:
        """(G_b, count) uint64, random: by which each row's reference is drawn."""
        key = (self.seed, batch.number, _REFERENCES)
        return _random_words(key, len(batch.samples) * count).reshape(-1, count)

    def _shuffled(self, epoch: int, length: int) -> np.ndarray:
        return seeded_permutation(length, (self.seed, epoch, _SHUFFLE))


def _random_words(key: tuple[int, ...], count: int) -> np.ndarray:
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


def seeded_permutation(length: int, key: tuple[int, int, int]) -> np.ndarray:
    """A permutation of range(length) that `key` determines for good: of numpy's generators only the raw output never
    changes with its version, so random 64-bit numbers are sorted (0.1 s for a million)."""
    return np.argsort(_random_words(key, length), kind="stable").astype(
        np.int32 if length < 2**31 else np.int64
    )

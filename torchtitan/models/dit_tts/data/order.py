"""The order of training: which samples make up global batch number k.

A pure function of (the samples of each bucket, the batch sizes, the seed). It knows nothing
of ranks, workers or accumulation, so a run resumed on other machines sees the same batches.

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
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError

# Third word of the shuffle's key, where the streams have their bucket number.
_SHUFFLE = 2**32 - 1


@dataclass(frozen=True)
class GlobalBatch:
    """One step's samples.

    Attributes:
        number: the batch's place in training, from 0.
        epoch: from 0.
        bucket: number of its length bucket.
        samples: (G_b,) int64 sample numbers, in row order.
    """

    number: int
    epoch: int
    bucket: int
    samples: np.ndarray


class GlobalOrder:
    """Random access to the endless sequence of global batches.

    Args:
        bucket_samples: for each bucket, the numbers of its samples; may be empty arrays.
        batch_sizes: samples in a global batch of each bucket.
        seed: any integer from 0 to 2**63 - 1.

    Not thread-safe: it keeps the permutations in use, at most two a bucket.
    """

    def __init__(self, bucket_samples: Sequence[np.ndarray], batch_sizes: Sequence[int], seed: int):
        if not 0 <= seed < 2**63:
            raise InputError(f"data.seed is {seed}; it must be from 0 to 2**63 - 1.")
        assert len(bucket_samples) == len(batch_sizes) and all(size > 0 for size in batch_sizes)
        self.seed = seed
        self.batch_sizes = tuple(int(size) for size in batch_sizes)
        self._samples = [np.asarray(samples, dtype=np.int64) for samples in bucket_samples]
        self._counts = [len(samples) for samples in self._samples]
        if not sum(self._counts):
            raise InputError("the order has no samples; every bucket is empty.")
        self._kept: dict[int, OrderedDict[int, np.ndarray]] = {}

    def samples_fingerprint(self) -> str:
        """Of the samples and their buckets, whatever their files."""
        digest = hashlib.sha256()
        for samples in self._samples:
            digest.update(len(samples).to_bytes(8, "little") + samples.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def batches_before_epoch(self, epoch: int) -> int:
        """C(e): global batches of the epochs 0 .. e-1."""
        return sum(
            epoch * count // size
            for count, size in zip(self._counts, self.batch_sizes, strict=True)
        )

    def batches_in_epoch(self, epoch: int) -> int:
        return self.batches_before_epoch(epoch + 1) - self.batches_before_epoch(epoch)

    @property
    def batches_per_epoch(self) -> float:
        """On average over epochs; below 1 where a batch is larger than the data."""
        return sum(count / size for count, size in zip(self._counts, self.batch_sizes, strict=True))

    def epoch_of(self, number: int) -> int:
        """The epoch e with C(e) <= number < C(e+1)."""
        assert number >= 0
        high = 1
        while self.batches_before_epoch(high) <= number:
            high *= 2
        low = 0  # C(low) <= number < C(high)
        while high - low > 1:
            middle = (low + high) // 2
            if self.batches_before_epoch(middle) <= number:
                low = middle
            else:
                high = middle
        return low

    def batch(self, number: int) -> GlobalBatch:
        """Global batch ``number``; a few microseconds, but at the first touch of an epoch."""
        epoch = self.epoch_of(number)
        firsts = [
            epoch * count // size
            for count, size in zip(self._counts, self.batch_sizes, strict=True)
        ]
        lasts = [
            (epoch + 1) * count // size
            for count, size in zip(self._counts, self.batch_sizes, strict=True)
        ]
        shuffle = self._permutation(_SHUFFLE, epoch, sum(lasts) - sum(firsts))
        slot = int(shuffle[number - sum(firsts)])
        for bucket, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            if slot < last - first:
                break
            slot -= last - first
        size = self.batch_sizes[bucket]
        start = (first + slot) * size
        return GlobalBatch(number, epoch, bucket, self._stream(bucket, start, start + size))

    def _stream(self, bucket: int, start: int, stop: int) -> np.ndarray:
        """Positions [start, stop) of a bucket's stream."""
        count = self._counts[bucket]
        parts = []
        while start < stop:
            epoch, offset = divmod(start, count)
            taken = min(stop - start, count - offset)
            parts.append(self._permutation(bucket, epoch, count)[offset : offset + taken])
            start += taken
        return self._samples[bucket][np.concatenate(parts)]

    def _permutation(self, word: int, epoch: int, length: int) -> np.ndarray:
        """Of bucket ``word``, or of all batches; two epochs are kept, as a batch may straddle."""
        kept = self._kept.setdefault(word, OrderedDict())
        if epoch not in kept:
            kept[epoch] = seeded_permutation(length, (self.seed, epoch, word))
            if len(kept) > 2:
                kept.popitem(last=False)
        return kept[epoch]


def seeded_permutation(length: int, key: tuple[int, int, int]) -> np.ndarray:
    """A permutation of range(length) that ``key`` determines for good.

    numpy promises that the raw output of its bit generators never changes, but not that
    ``Generator.permutation`` does not. A resume must not depend on numpy's version, so random
    64-bit numbers are sorted instead (0.1 s for a million).
    """
    numbers = np.random.Philox(np.random.SeedSequence(key)).random_raw(length)
    return np.argsort(numbers, kind="stable").astype(np.int32 if length < 2**31 else np.int64)

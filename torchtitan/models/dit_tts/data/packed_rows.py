"""The rows of packed batches: which whole samples stand one behind the other in each of them.

A row has N latent frames, L text tokens and P reference frames. N is `longest_per_row` utterances of the longest
length; L and P follow from the data, so that all three streams are about equally full. A global batch is
G / longest_per_row rows, as many frames as in a global batch of the longest bucket.

**Filling.** The rows of an epoch begin as equal numbers of samples of its permutation. Then, sweep by sweep, each row
that is too long in any stream meets a random partner, and the two exchange those two samples (or a sample and an empty
slot) that make them most alike in all three: 1 % of slack is enough for rows of ten samples, 1 s for a million samples.

**Groups of epochs.** The samples of `epochs` epochs are placed together: one epoch, or where data are few as many as
fill whole global batches. Within a group each sample comes as often as in its epochs. Random numbers are raw words of a
bit generator and all else is integers: the same on every machine.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.batch_sampler import (
    WEIGHT_BITS,
    GlobalBatch,
    GlobalBatchSampler,
)
from torchtitan.models.dit_tts.data.buckets import (
    ALIGNMENT,
    BatchPolicy,
    make_batch_policy,
    round_up,
)
from torchtitan.models.dit_tts.data.references import MIN_FRAMES
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.tools.logging import logger

_ROWS = 2**27  # third word of the key of a group's pairs, in addition to those of the order
_SLACK = (5, 10, 15, 20, 30, 50, 80, 120, 180, 250, 350, 500, 700, 1000, 3000)
"""Thousandths of the mean row that rows are larger, of which the first with which a trial fills them counts"""
_ROUNDING = 10  # thousandths that whole global batches may add to it
_MIN_ROWS = 32  # placed together: among few, too few pairs fit
_MAX_EPOCHS = 4096
_TRIAL_SAMPLES, _TRIAL_SWEEPS, _SWEEPS, _ATTEMPTS = 1 << 17, 300, 1000, 5
_UNITS = 1 << 12  # of a row, to compare streams
_PAIRS = 256  # exchanged at once, so that the differences stay in cache


@dataclass(frozen=True)
class PackedPolicy(BatchPolicy):
    """One shape, (N, L, P) of a row, and rows as `batch_sizes`.

    Attributes:
        lengths: (n, 3) int64, frames, text tokens and reference frames (in whole patches, the mean of drawn ones) of
            each selected sample.
        longest: frames, text tokens and reference frames that one sample can have at most.
        max_samples: of a row.
        slack: thousandths by which a row is larger than the mean one, at least.
        epochs: whose samples are placed together.
    """

    lengths: np.ndarray
    longest: tuple[int, int, int]
    max_samples: int
    slack: int
    epochs: int

    def batches(self, times: np.ndarray) -> int:
        """Global batches for the samples, each so often (n,)."""
        rows = np.array(self.shapes[0]) * self.batch_sizes[0] * 1000
        in_slots = int(times.sum()) // (self.max_samples * self.batch_sizes[0]) + 1
        return max(in_slots, *(-(-(times @ self.lengths) * (1000 + self.slack) // rows)).tolist())


def batch_policy(
    data: Data,
    global_batch_size: int,
    frames: np.ndarray,
    reference_frames: np.ndarray,
    text_tokens: np.ndarray,
    draws: np.ndarray | None = None,
) -> BatchPolicy:
    """The buckets or the rows of selected samples; arguments as of `make_batch_policy`."""
    if data.batching == "buckets":
        return make_batch_policy(
            data, global_batch_size, frames, reference_frames, text_tokens, draws
        )
    patch, limits = data.speaker_patch_size, reference_limits(data, frames)
    reference_frames = np.minimum(reference_frames, limits)
    longest_reference = int(reference_frames.max())
    if data.references == "drawn":
        longest_reference = int(limits.max())
        reference_frames = (np.minimum(MIN_FRAMES, limits) + limits) // 2  # their mean
    lengths = np.stack([frames, text_tokens, round_up(reference_frames, patch)], 1).astype(np.int64)
    longest = (
        min(data.max_frames, round_up(int(frames.max()), ALIGNMENT)),
        int(text_tokens.max()),
        round_up(longest_reference, patch),
    )
    often = np.full(len(frames), 1 << WEIGHT_BITS) if draws is None else draws
    totals = (often @ lengths) >> WEIGHT_BITS  # of an epoch
    N = round_up(data.longest_per_row * longest[0], ALIGNMENT)
    of_batch = global_batch_size // data.longest_per_row
    for least in _SLACK:
        # Another epoch may be harder to place, and with weights it has other samples.
        slack = least + 5 if draws is None else 2 * least + 10
        epochs, rows = _whole_batches(int(totals[0]) * (1000 + slack), N * 1000, of_batch)
        mean = -(-epochs * totals * (1000 + slack) // (1000 * rows))
        L = round_up(max(int(mean[1]), longest[1]), ALIGNMENT)
        P = round_up(max(int(mean[2]), longest[2]), ALIGNMENT * patch)
        times = (epochs * often + (1 << (WEIGHT_BITS - 1))) >> WEIGHT_BITS
        placed = np.repeat(np.arange(len(frames)), times)
        max_samples = -(-len(placed) * 5 // (rows * 4)) + 1
        trial_rows = rows * (1000 + least) // (1000 + slack)
        trial_rows = max(1, trial_rows, -(-len(placed) // max_samples))
        if _can_be_filled(lengths[placed], trial_rows, (N, L, P), max_samples):
            break
    else:
        raise InputError(
            f"[data] longest_per_row = {data.longest_per_row}: samples of these lengths cannot fill packed rows; "
            f"raise it, or set batching to 'buckets'"
        )
    totals[2] = often @ reference_frames >> WEIGHT_BITS
    useful = (epochs * totals / (rows * np.array([N, L, P]))).tolist()
    return PackedPolicy(
        edges=(N,),
        shapes=((N, L, P),),
        batch_sizes=(of_batch,),
        sample_counts=(len(frames),),
        useful_fraction=useful[0],
        useful_text_fraction=useful[1],
        useful_reference_fraction=useful[2],
        lengths=lengths,
        longest=longest,
        max_samples=max_samples,
        slack=slack,
        epochs=epochs,
    )


def make_order(
    policy: BatchPolicy,
    samples: np.ndarray,
    frames: np.ndarray,
    seed: int,
    draws: np.ndarray | None = None,
) -> GlobalBatchSampler:
    """The order of `samples` (n,), of which the policy was made, with `frames` (n,)."""
    if isinstance(policy, PackedPolicy):
        return PackedSampler(samples, policy, seed, draws)
    bucket = policy.bucket_of(frames)
    inside = [np.flatnonzero(bucket == number) for number in range(len(policy.edges))]
    weights = None if draws is None else [draws[rows] for rows in inside]
    return GlobalBatchSampler([samples[rows] for rows in inside], policy.batch_sizes, seed, weights)


def reference_limits(data: Data, frames: np.ndarray) -> np.ndarray:
    """Longest reference of samples of these frames, in whole blocks of speaker keys."""
    limits = np.full(len(frames), data.max_speaker_frames)
    if data.max_reference_ratio:
        ratio = (data.max_reference_ratio * frames).astype(np.int64).clip(1)
        limits = np.minimum(limits, round_up(ratio, ALIGNMENT * data.speaker_patch_size))
    return limits


def _whole_batches(frames: int, row: int, rows: int) -> tuple[int, int]:
    """The fewest epochs, of so many frames, that nearly fill whole global batches of so many rows, and all
    rows that this takes."""
    epochs = np.arange(1, 1 + min(_MAX_EPOCHS, max(1, 10**15 // frames)))  # products fit 64 bits
    batches = -(-epochs * frames // (row * rows))
    waste = batches * row * rows * 1000 // (epochs * frames)
    good = (waste <= 1000 + _ROUNDING) & (batches * rows >= _MIN_ROWS)
    index = int(good.argmax() if good.any() else waste.argmin())
    return index + 1, int(batches[index]) * rows


def _can_be_filled(
    lengths: np.ndarray, rows: int, capacity: tuple[int, int, int], max_samples: int
) -> bool:
    """True if rows take these samples without much effort, judged by a part of them where they are many."""
    every = -(-len(lengths) // _TRIAL_SAMPLES)
    rows = -(-rows // every)
    words = np.random.Philox(np.random.SeedSequence((0, 0, _ROWS)))
    part = np.argsort(words.random_raw(len(lengths)), kind="stable")[::every]
    _, too_long = fill_rows(lengths[part], rows, capacity, max_samples, words, rows, _TRIAL_SWEEPS)
    return not len(too_long)


def fill_rows(
    lengths: np.ndarray,
    rows: int,
    capacity: tuple[int, int, int],
    max_samples: int,
    words: np.random.Philox,
    neighbours: int,
    sweeps: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Place samples, in their order at first, in rows.

    Args:
        lengths: (n, 3) int64.
        max_samples: of a row; n is at most `rows` times as many.
        words: a source of random numbers.
        neighbours: rows among which one finds its partner.

    Returns:
        (rows, max_samples), the samples' indices and n for an empty slot; and the numbers of the rows that
        are longer than `capacity` after all.
    """
    n = len(lengths)
    starts = np.arange(rows + 1) * n // rows
    row_of = np.repeat(np.arange(rows), np.diff(starts))
    table = np.full((rows, max_samples), n, np.int32)
    table[row_of, np.arange(n) - starts[row_of]] = np.arange(n)
    lengths = np.concatenate([lengths, np.zeros((1, 3), np.int64)])
    units = (lengths * _UNITS // capacity).astype(np.int32)
    loads = np.diff(_sums_before(units)[starts], axis=0).astype(np.int32).T.copy()
    sums = np.diff(_sums_before(lengths)[starts], axis=0)
    over: np.ndarray = np.any(sums > capacity, axis=1)
    place = np.empty(rows, np.int64)
    for _ in range(sweeps):
        too_long = np.flatnonzero(over)
        if not len(too_long):
            break
        offsets = words.random_raw(len(too_long)) % np.uint64(neighbours)
        partners = (too_long + offsets.astype(np.int64) - neighbours // 2) % rows
        pairs = np.stack([too_long, partners], 1)
        flat, order = pairs.ravel(), np.arange(pairs.size)
        # A row takes part once, where it comes first: of values for one place the last one stays.
        place[flat[::-1]] = order[::-1]
        pairs = pairs[(place[flat] == order).reshape(-1, 2).all(1)]
        for first in range(0, len(pairs), _PAIRS):
            left, right = pairs[first : first + _PAIRS].T
            left, i, right, j = _exchange(table, loads, units, left, right)
            moved = lengths.take(table[left, i], 0) - lengths.take(table[right, j], 0)
            sums[left] += moved
            sums[right] -= moved
        changed = pairs.ravel()
        over[changed] = (sums[changed] > capacity).any(1)
    return table, np.flatnonzero(over)


def _sums_before(rows: np.ndarray) -> np.ndarray:
    """(n, 3) to (n + 1, 3), the sum of the rows before each."""
    return np.concatenate([np.zeros((1, 3), np.int64), rows.cumsum(0, dtype=np.int64)])


def _exchange(
    table: np.ndarray, loads: np.ndarray, units: np.ndarray, left: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Let each of the rows `left` exchange the slot with its partner in `right` that makes them most alike: moving
    δ = u[j] - u[i] makes the difference v of their loads v - 2δ, in each stream. Returns the rows and slots exchanged."""
    pair, none = np.arange(len(left)), len(units) - 1
    of_left, of_right = table.take(left, 0), table.take(right, 0)
    # Of the slots that no row uses the first is enough: of equal pairs the first counts.
    used = ((of_left != none) | (of_right != none)).any(0)
    slots = min(table.shape[1], int(used.nonzero()[0][-1]) + 2)
    one, other = (
        2 * np.ascontiguousarray(units.take(rows[:, :slots], 0).T) for rows in (of_left, of_right)
    )
    v = (loads[:, right] - loads[:, left]).clip(-4 * _UNITS, 4 * _UNITS)  # squares fit 32 bits
    other -= v[:, None]
    cost = np.zeros((slots, slots, len(left)), np.int32)
    for of_one, of_other in zip(one, other):
        rest = of_other - of_one[:, None]
        rest *= rest
        cost += rest
    flat = np.ascontiguousarray(cost.reshape(-1, len(left)).T)
    best = flat.argmin(1)
    better = flat[pair, best] < (v * v).sum(0)
    i, j = np.divmod(best[better], slots)
    left, right = left[better], right[better]
    moved = (units.take(table[right, j], 0) - units.take(table[left, i], 0)).T
    loads[:, left] += moved
    loads[:, right] -= moved
    table[left, i], table[right, j] = table[right, j], table[left, i]
    return left, i, right, j


class PackedSampler(GlobalBatchSampler):
    """Random access to the global batches of packed rows: the first of a group of epochs takes seconds per million
    samples. samples: (n,) int64 numbers of the samples of `policy`; draws: (n,) as `bucket_weights`."""

    def __init__(
        self, samples: np.ndarray, policy: PackedPolicy, seed: int, draws: np.ndarray | None = None
    ):
        super().__init__([samples], policy.batch_sizes, seed, None if draws is None else [draws])
        self.policy = policy
        self._is_even = draws is None
        self._stream = self._streams[0]
        self._ends = [0]
        self._rows = lru_cache(2)(self._fill)

    def samples_fingerprint(self) -> str:
        policy = self.policy
        settings = [*policy.shapes[0], policy.max_samples, policy.slack, policy.epochs]
        digest = hashlib.sha256(super().samples_fingerprint().encode() + str(settings).encode())
        digest.update(policy.lengths.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def _batches_before(self, group: int) -> int:
        """Global batches of the groups before this one."""
        epochs = self.policy.epochs
        if self._is_even and group > 1:
            return group * self._batches_before(1)
        while len(self._ends) <= group:
            number = len(self._ends) - 1
            times = self._stream.times(number * epochs, (number + 1) * epochs)
            self._ends.append(self._ends[-1] + self.policy.batches(times))
        return self._ends[group]

    def _before_epoch(self, epoch: int) -> list[int]:
        group, part = divmod(epoch, self.policy.epochs)
        before = self._batches_before(group)
        if part:
            before += (self._batches_before(group + 1) - before) * part // self.policy.epochs
        return [before]

    @property
    def bucket_batches_per_epoch(self) -> list[float]:
        """Global batches per epoch, from the first group of epochs."""
        return [self._batches_before(1) / self.policy.epochs]

    def batch(self, number: int) -> GlobalBatch:
        epoch = self.epoch_of(number)
        group = epoch // self.policy.epochs
        samples, starts = self._rows(group)
        rows = self.batch_sizes[0]
        first = (number - self._batches_before(group)) * rows
        starts = starts[first : first + rows + 1]
        return GlobalBatch(number, epoch, 0, samples[starts[0] : starts[-1]], starts - starts[0])

    def _fill(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """(samples of all rows of a group one behind the other, (rows + 1,) where each row begins)."""
        policy, epochs = self.policy, self.policy.epochs
        end = (group + 1) * epochs
        places = self._stream.rows(
            self._stream.before_epoch(group * epochs), self._stream.before_epoch(end), end - 1
        )
        drawn = self._stream.samples[places]
        rows = (self._batches_before(group + 1) - self._batches_before(group)) * self.batch_sizes[0]
        lengths = policy.lengths.take(places, 0)
        neighbours = rows if epochs == 1 else max(_MIN_ROWS, rows // epochs)
        for attempt in range(_ATTEMPTS):
            words = np.random.Philox(np.random.SeedSequence((self.seed, group, _ROWS, attempt)))
            table, too_long = fill_rows(
                lengths, rows, policy.shapes[0], policy.max_samples, words, neighbours, _SWEEPS
            )
            if not len(too_long):
                break
        else:
            table = _leave_out(table, too_long, lengths, policy.shapes[0])
        used = table < len(drawn)
        if lost := len(drawn) - int(used.sum()):
            logger.warning(
                f"{lost} of {len(drawn)} samples do not fit the rows of epoch {end - epochs} and are left out"
            )
        return drawn[table[used]], np.concatenate([[0], used.sum(1).cumsum()])


def _leave_out(
    table: np.ndarray, too_long: np.ndarray, lengths: np.ndarray, capacity: tuple[int, int, int]
) -> np.ndarray:
    """The rows without the last samples of those that are too long."""
    none = len(lengths)
    lengths = np.concatenate([lengths, np.zeros((1, 3), np.int64)])
    over = (lengths[table[too_long]].cumsum(1) > capacity).any(2)
    table[too_long] = np.where(over, none, table[too_long])
    return table

"""Length buckets: the few static shapes of a run and the batch size of each.

Every batch of bucket b has the shape (T_b, L_b, R_b): latent frames, text tokens and reference frames, to which shorter
samples are padded. T_b is the longest utterance and L_b the longest text of the bucket, rounded up. R_b is the longest
reference, but at most `max_speaker_frames` and, in all but the longest bucket,

    R_b <= max_reference_ratio * T_b        rounded up to whole blocks of speaker keys;

longer references are cropped to it. Otherwise nearly every bucket would have R = max_speaker_frames, most of it padding.

Batch sizes follow a budget of frames: with G samples in a global batch of the longest bucket (of T_max
frames), bucket b has

    G_b = max(M, floor(G * T_max / (T_b * M)) * M)      M = batch_multiple

samples, so that every step costs about the same and the ranks can divide every batch.
"""

from dataclasses import dataclass

import numpy as np

from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.errors import InputError

# Lengths are rounded up to it: tensor cores and attention kernels want multiples of 8.
ALIGNMENT = 8


@dataclass(frozen=True)
class Selection:
    """The samples that a run uses.

    Attributes:
        samples, frames: (n,) int64 numbers in the dataset, ascending, and their frames.
        too_long, too_much_text: samples left out for their frames, and of the others for their tokens.
    """

    samples: np.ndarray
    frames: np.ndarray
    too_long: int
    too_much_text: int


@dataclass(frozen=True)
class BatchPolicy:
    """Static shapes and batch sizes, one entry per bucket, shortest bucket first.

    Attributes:
        edges: maximum latent frames of a sample in the bucket; also T of its shape.
        shapes: (T frames, L text tokens, R reference frames) of every batch of the bucket.
        batch_sizes: samples in one global batch.
        sample_counts: samples of the dataset that fall in the bucket; may be 0 where the edges were given.
        useful_fraction, useful_text_fraction, useful_reference_fraction: valid over all latent frames, text tokens and
            reference frames (after cropping), expected over an epoch.
    """

    edges: tuple[int, ...]
    shapes: tuple[tuple[int, int, int], ...]
    batch_sizes: tuple[int, ...]
    sample_counts: tuple[int, ...]
    useful_fraction: float
    useful_text_fraction: float
    useful_reference_fraction: float

    def bucket_of(self, frames: np.ndarray) -> np.ndarray:
        """Bucket number of samples of these lengths, each the shortest that holds it."""
        return np.searchsorted(self.edges, frames)


def select_samples(frames: np.ndarray, text_tokens: np.ndarray, data: Data) -> Selection:
    """Leave out the samples over the limits: frames (n,) and maximum tokens (n,) over the dataset. Raises InputError
    where none is left."""
    fits_frames, fits_text = frames <= data.max_frames, text_tokens <= data.max_text_tokens
    samples = np.flatnonzero(fits_frames & fits_text)
    too_long, too_much_text = int((~fits_frames).sum()), int((fits_frames & ~fits_text).sum())
    if not len(samples):
        raise InputError(
            f"none of the {len(frames)} samples fits [data] max_frames = {data.max_frames} "
            f"({too_long} are longer) and max_text_tokens = {data.max_text_tokens} "
            f"({too_much_text} have more); {sufficient_limits(frames, text_tokens, data)}"
        )
    return Selection(samples, frames[samples].astype(np.int64), too_long, too_much_text)


def sufficient_limits(frames: np.ndarray, text_tokens: np.ndarray, data: Data) -> str:
    """Return a sentence with the limits at which all samples fit."""
    needed = {"max_frames": frames, "max_text_tokens": text_tokens}
    longest = {name: round_up(int(each.max()), ALIGNMENT) for name, each in needed.items()}
    given = (f"--data.{name} {n}" for name, n in longest.items() if n > getattr(data, name))
    return f"all fit with {' '.join(given)}"


def make_batch_policy(
    data: Data,
    global_batch_size: int,
    frames: np.ndarray,
    reference_frames: np.ndarray,
    text_tokens: np.ndarray,
    draws: np.ndarray | None = None,
) -> BatchPolicy:
    """Choose the buckets that `[data]` sets for selected samples: frames, reference_frames, text_tokens (n,), and draws
    (n,), how often each is drawn, in any unit (None: all alike). `global_batch_size`: samples in the longest bucket."""
    edges = list(data.bucket_frames) or choose_edges(
        frames, data.num_buckets, data.max_frames, draws
    )
    longest = edges[-1]
    if frames.max() > longest:
        raise InputError(
            f"[data] bucket_frames ends at {longest} frames but a sample within max_frames has "
            f"{frames.max()}; add a longer bucket or set max_frames to {longest}"
        )
    bucket = np.searchsorted(edges, frames)
    shapes, batch_sizes, counts = [], [], []
    for number, edge in enumerate(edges):
        inside = bucket == number
        # Drawn references have any length up to R.
        max_reference = data.max_speaker_frames
        if data.references == "stored":
            max_reference = int(reference_frames[inside].max(initial=1))
        if data.max_reference_ratio and number < bucket.max():
            max_reference = min(max_reference, max(1, int(data.max_reference_ratio * edge)))
        # An empty bucket still has a shape, as if it held one short sample.
        max_text = int(text_tokens[inside].max(initial=1))
        shapes.append(batch_shape(data, edge, max_text, max_reference))
        multiples = global_batch_size * longest // (edge * data.batch_multiple)
        batch_sizes.append(max(1, multiples) * data.batch_multiple)
        counts.append(int(inside.sum()))
    often = np.ones(len(frames)) if draws is None else draws
    useful = []
    if data.references == "drawn":
        reference_frames = np.array([(R + 1) / 2 for _, _, R in shapes])[bucket]  # their mean
    for lengths, stream in zip((frames, text_tokens, reference_frames), zip(*shapes)):
        padded = np.array(stream)[bucket]
        useful.append(float(often @ np.minimum(lengths, padded) / (often @ padded)))
    return BatchPolicy(
        edges=tuple(edges),
        shapes=tuple(shapes),
        batch_sizes=tuple(batch_sizes),
        sample_counts=tuple(counts),
        useful_fraction=useful[0],
        useful_text_fraction=useful[1],
        useful_reference_fraction=useful[2],
    )


def batch_shape(data: Data, frames: int, max_text: int, max_reference: int) -> tuple[int, int, int]:
    """(T, L, R) of a batch of T frames with texts and references up to these lengths."""
    L = min(data.max_text_tokens, round_up(max_text, ALIGNMENT))
    # The keys of a reference are counted in patches.
    multiple = ALIGNMENT * data.speaker_patch_size
    return frames, L, min(data.max_speaker_frames, round_up(max_reference, multiple))


def choose_edges(
    frames: np.ndarray, num_buckets: int, max_frames: int, draws: np.ndarray | None = None
) -> list[int]:
    """The at most `num_buckets` edges that leave the fewest padded frames.

    Lengths are first rounded up to `ALIGNMENT` (never above `max_frames`), which leaves m
    candidate edges u. A dynamic programme over them, O(num_buckets * m^2), minimises

        sum over samples of the edge of its bucket,

    each as often as it is drawn where `draws` (n,) are given.
    """
    rounded = np.minimum(round_up(frames.astype(np.int64), ALIGNMENT), max_frames)
    candidates, index = np.unique(rounded, return_inverse=True)
    counts = np.bincount(index, draws)
    m = len(candidates)
    below = np.concatenate([[0], np.cumsum(counts)])  # below[j]: samples under candidate j
    # cost[j]: fewest frames for the candidates 0..j-1 with the buckets used so far
    cost = np.full(m + 1, np.inf)
    cost[0] = 0
    choices = []
    for _ in range(min(num_buckets, m)):
        next_cost = np.full(m + 1, np.inf)
        choice = np.zeros(m + 1, dtype=np.int64)
        for j in range(1, m + 1):
            # the last bucket holds candidates i..j-1 and is as long as candidate j-1
            totals = cost[:j] + candidates[j - 1] * (below[j] - below[:j])
            choice[j] = np.argmin(totals)
            next_cost[j] = totals[choice[j]]
        cost = next_cost
        choices.append(choice)
    # Splitting a bucket never costs frames, so all the allowed buckets are used.
    edges, j = [], m
    for choice in reversed(choices):
        edges.append(int(candidates[j - 1]))
        j = int(choice[j])
    return edges[::-1]


def round_up(value, multiple: int):
    return -(-value // multiple) * multiple

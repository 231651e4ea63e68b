"""Which utterances a sample's speaker reference is made of, and which part of them.

References are other training utterances of the speaker: never the sample itself, and for a held-out
sample never a held-out one, so that evaluating needs nothing which training has not seen. If the
speaker has no other training utterance, the reference is a part of the sample itself, half of it at
the maximum: all of it would let a model copy its target from the reference.
"""

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Span:
    """`frames` latent frames from frame `start` of sample number `sample`."""

    sample: int
    start: int
    frames: int


class SpeakerTable:
    """Samples by speaker.

    Args:
        speaker: number of each sample's speaker, (n,).
        train: whether it is a training sample, (n,) bool.
        frames: its length, (n,).
    """

    def __init__(self, speaker: np.ndarray, train: np.ndarray, frames: np.ndarray):
        self.speaker, self.train, self.frames = speaker, train, frames
        # Training samples by speaker, in the order of the list within each.
        numbers = np.flatnonzero(train)
        self._by_speaker = numbers[np.argsort(speaker[numbers], kind="stable")]
        counts = np.bincount(speaker[numbers], minlength=int(speaker.max(initial=-1)) + 1)
        self._last = np.cumsum(counts)
        self._first = self._last - counts

    def same_speaker(self, sample: int) -> np.ndarray:
        """Numbers of the training samples of a sample's speaker, in order, itself included."""
        speaker = int(self.speaker[sample])
        return self._by_speaker[self._first[speaker] : self._last[speaker]]

    def without_others(self) -> np.ndarray:
        """(n,) bool: samples whose speaker has no other training sample."""
        return (self._last - self._first)[self.speaker] == self.train


def choose_references(
    table: SpeakerTable, sample: int, key: str, *, seed: int, count: int, max_frames: int
) -> list[Span]:
    """The parts, to be joined along time, that a sample's reference is made of.

    `count` different other utterances, fewer where the speaker has fewer, joined and cropped to
    `max_frames` from a random frame on. It depends on (seed, key) and on the speaker's training
    utterances: other speakers' number or order does not change it.
    """
    key_digest = hashlib.sha256(key.encode()).digest()
    random = np.random.default_rng([seed, int.from_bytes(key_digest[:8], "little")])
    candidates = table.same_speaker(sample)
    # The sample's own place among them, which the draw passes over.
    own = int(np.searchsorted(candidates, sample)) if table.train[sample] else len(candidates)
    others = len(candidates) - bool(table.train[sample])
    frames = table.frames
    if not others:
        length = min(max(1, int(frames[sample]) // 2), max_frames)
        start = int(random.integers(int(frames[sample]) - length + 1))
        return [Span(sample, start, length)]
    if count == 1:
        drawn = [int(random.integers(others))]
    else:
        drawn = random.choice(others, size=min(count, others), replace=False).tolist()
    chosen = [int(candidates[number + (number >= own)]) for number in drawn]
    total = sum(int(frames[other]) for other in chosen)
    length = min(total, max_frames)
    start = int(random.integers(total - length + 1))
    spans, position = [], 0
    for other in chosen:
        first = max(start - position, 0)
        last = min(start + length - position, int(frames[other]))
        if first < last:
            spans.append(Span(other, first, last - first))
        position += int(frames[other])
    return spans

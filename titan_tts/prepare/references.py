"""Chooses a sample's speaker reference: an utterance, and a part of it.

A reference never comes from its own target: neither the sample nor a copy of it (equal latents) is
drawn. Training samples get other training utterances of their speaker; held-out samples other
held-out utterances, or if there are none training utterances. A sample without such an utterance has
no reference: a part of the target would let a model copy what it should say.
"""

import hashlib
from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """`frames` latent frames from frame `start` of a sample."""

    sample: int
    start: int
    frames: int


class SpeakerTable:
    """Samples by speaker and split; `content` has hashes of their latents. All arrays are (n,)."""

    def __init__(
        self, speaker: np.ndarray, train: np.ndarray, frames: np.ndarray, content: np.ndarray
    ):
        self.speaker, self.train, self.frames = speaker, train, frames
        self._original = _originals(speaker, content)
        # Samples by speaker and split, in the order of the list within each, copies together.
        self._split = speaker.astype(np.int64) * 2 + train
        self._order = np.lexsort((self._original, self._split))
        self._ordered_originals = self._original[self._order]
        counts = np.bincount(self._split, minlength=2 * (int(speaker.max(initial=-1)) + 1))
        self._last = np.cumsum(counts)
        self._first = self._last - counts

    def candidates(self, sample: int) -> tuple[np.ndarray, int, int]:
        """(samples, start, stop): samples of the speaker, of which [start:stop], the sample and its copies, must not be
        drawn; empty without any other sample."""
        own = int(self._split[sample])
        for split in (own, own | 1):  # its own split, then the speaker's training part
            part = slice(self._first[split], self._last[split])
            originals, original = self._ordered_originals[part], self._original[sample]
            own_from = int(np.searchsorted(originals, original, "left"))
            own_to = int(np.searchsorted(originals, original, "right"))
            if own_to - own_from < len(originals):
                return self._order[part], own_from, own_to
        return self._order[:0], 0, 0


def _originals(speaker: np.ndarray, content: np.ndarray) -> np.ndarray:
    """(n,) the first sample of the same speaker with the same content."""
    order = np.lexsort((content, speaker))
    same = (np.diff(content[order]) == 0) & (np.diff(speaker[order]) == 0)
    starts = np.flatnonzero(np.concatenate([[True], ~same])[: len(order)])
    first = np.empty(len(order), np.int64)
    first[order] = np.repeat(order[starts], np.diff([*starts, len(order)]))
    return first


def choose_reference(
    table: SpeakerTable, sample: int, key: str, *, seed: int, max_frames: int, attempt: int = 0
) -> Span | None:
    """A sample's reference: another utterance, cropped to `max_frames` from a random frame on, or the `attempt`-th after
    it; None once every other was given. It depends on (seed, key) and on the speaker's utterances alone."""
    key_digest = hashlib.sha256(key.encode()).digest()
    random = np.random.default_rng([seed, int.from_bytes(key_digest[:8], "little")])
    candidates, own_from, own_to = table.candidates(sample)
    others = len(candidates) - (own_to - own_from)
    if attempt >= others:
        return None
    n = (int(random.integers(others)) + attempt) % others
    other = int(candidates[n if n < own_from else n + own_to - own_from])
    length = min(int(table.frames[other]), max_frames)
    return Span(other, int(random.integers(int(table.frames[other]) - length + 1)), length)

"""Chooses a sample's speaker reference: an utterance, and a part of it.

Training samples get other training utterances of their speaker; held-out samples other held-out utterances, or if there
are none training utterances. A sample without such an utterance has no reference: a part of the target would let a model
copy what it should say. `pack_shards` leaves out copies of the target and what overlaps it.
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
    """Samples by speaker and split. All arrays are (n,)."""

    def __init__(self, speaker: np.ndarray, train: np.ndarray, frames: np.ndarray):
        self.train, self.frames = train, frames
        self._split = speaker.astype(np.int64) * 2 + train
        self._order = np.argsort(self._split, kind="stable")
        counts = np.bincount(self._split, minlength=2 * (int(speaker.max(initial=-1)) + 1))
        self._last = np.cumsum(counts)
        self._first = self._last - counts

    def candidates(self, sample: int) -> tuple[np.ndarray, int, int]:
        """(samples, own, count): samples of the speaker, of which `count` may be drawn: all but the one at `own`, which is
        the sample itself. Of its own split, or if it is alone there of the speaker's training part."""
        own = int(self._split[sample])
        samples = self._order[self._first[own] : self._last[own]]
        if len(samples) > 1:
            return samples, int(np.searchsorted(samples, sample)), len(samples) - 1
        trained = self._order[self._first[own | 1] : self._last[own | 1]]
        trained = trained[trained != sample]
        return trained, len(trained), len(trained)


def choose_reference(
    table: SpeakerTable, sample: int, key: str, *, seed: int, max_frames: int, attempt: int = 0
) -> Span | None:
    """A sample's reference: another utterance, cropped to `max_frames` from a random frame on, or the `attempt`-th after
    it; None once every other was given. It depends on (seed, key) and on the speaker's utterances alone."""
    key_digest = hashlib.sha256(key.encode()).digest()
    random = np.random.default_rng([seed, int.from_bytes(key_digest[:8], "little")])
    candidates, own, count = table.candidates(sample)
    if attempt >= count:
        return None
    n = (int(random.integers(count)) + attempt) % count
    other = int(candidates[n + (n >= own)])
    length = min(int(table.frames[other]), max_frames)
    return Span(other, int(random.integers(int(table.frames[other]) - length + 1)), length)

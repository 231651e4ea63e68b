"""References drawn anew at each draw of a sample, from its speaker's other utterances: one to three, joined, of which a
part is taken, so that no model knows a sample by its reference. All follows from random words of (seed, global batch,
row), so every split and every resume draws the same."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchtitan.models.dit_tts.data.dataset import Dataset, LoadedSample

MAX_JOINED = 3  # utterances in one reference
MIN_FRAMES = 25  # the shortest length that is drawn, about a second; utterances may be shorter
WORDS = 3 + MAX_JOINED  # random 64-bit numbers that a draw takes


class Piece(NamedTuple):
    """Frames [start, start + frames) of a sample's latents."""

    sample: int
    start: int
    frames: int


class DrawnReferences:
    """The utterances of each speaker. Copies of an utterance under several names count as one.

    Args:
        samples: (n,) numbers of the samples that are used.
        speakers, frames, hashes: of all samples of the dataset, the speaker's code (-1 for none), the frames and the hash
            of the latents.

    Attributes:
        samples_with_same_speaker: how many of `samples` have another utterance by their speaker.
        speakers: how many speakers that are.
    """

    def __init__(
        self, samples: np.ndarray, speakers: np.ndarray, frames: np.ndarray, hashes: np.ndarray
    ):
        known = samples[speakers[samples] >= 0]
        known = known[np.lexsort((hashes[known], speakers[known]))]
        is_new_speaker = np.diff(speakers[known], prepend=-1) != 0
        is_new = is_new_speaker | (np.diff(hashes[known], prepend=hashes.dtype.type(0)) != 0)
        self._utterances = known[is_new]
        self._frames = frames
        # Of each sample of the dataset its utterance, of each utterance its speaker's first one and their
        # number.
        self._utterance = np.full(len(speakers), -1, np.int64)
        self._utterance[known] = np.cumsum(is_new) - 1
        firsts = np.flatnonzero(is_new_speaker[is_new])
        counts = np.diff(firsts, append=len(self._utterances))
        self._first, self._count = np.repeat(firsts, counts), np.repeat(counts, counts)
        self.samples_with_same_speaker = int((self._count[self._utterance[known]] > 1).sum())
        self.speakers = int((counts > 1).sum())

    def draw(self, words: Sequence[int], sample: int, max_frames: int) -> list[Piece]:
        """The parts of a reference, in their order; none where the speaker has no other utterance.
        `words`: `WORDS` random 64-bit numbers. max_frames: R of its batch; lengths up to it are
        equally likely.
        """
        index = int(self._utterance[sample])
        if index < 0 or self._count[index] < 2:
            return []
        first, count = int(self._first[index]), int(self._count[index])
        number, length, offset, *picks = words
        taken = [index - first]
        for pick in picks[: 1 + number % min(MAX_JOINED, count - 1)]:
            chosen = pick % (count - len(taken))
            for other in sorted(taken):  # counted without those that are taken
                chosen += chosen >= other
            taken.append(chosen)
        samples = [int(self._utterances[first + chosen]) for chosen in taken[1:]]
        frames = self._frames[samples].tolist()
        total, shortest = sum(frames), min(MIN_FRAMES, max_frames)
        wanted = min(total, shortest + length % (max_frames - shortest + 1))
        start = offset % (total - wanted + 1)
        return _cut(samples, frames, start, start + wanted)

    def draw_one(self, words: Sequence[int], sample: int, max_frames: int) -> Piece | None:
        """One other utterance by the speaker, whole or cropped to `max_frames`; None where there is no other."""
        whole = max(0, max_frames - MIN_FRAMES)
        return next(iter(self.draw([0, whole, *words[2:]], sample, max_frames)), None)


class FixedReferences:
    """A reference of each sample, the same in every run: the stored one, or where the dataset stores none at all
    another whole utterance by the speaker, cropped. For figures that are compared, and for voices.
    """

    def __init__(self, dataset: Dataset):
        self._dataset = dataset
        self._drawn: DrawnReferences | None = None
        if not dataset.reference_frames.any():
            codes, _ = dataset.labels("speaker")
            self._drawn = DrawnReferences(
                np.arange(len(dataset)), codes, dataset.frames, dataset.latents_hash
            )

    def pieces(self, sample: int, max_frames: int) -> list[Piece]:
        """The parts of a drawn reference; none where it is stored, or the speaker has no other utterance."""
        if self._drawn is None:
            return []
        key = np.random.SeedSequence(int(self._dataset.latents_hash[sample]))
        words = np.random.Philox(key).random_raw(WORDS).tolist()
        piece = self._drawn.draw_one(words, sample, max_frames)
        return [] if piece is None else [piece]

    def load(self, sample: int, loaded: LoadedSample, max_frames: int) -> np.ndarray:
        """(R, C) float32: the reference of a sample that was loaded."""
        found = [loaded.reference[:max_frames]]
        for piece in self.pieces(sample, max_frames):
            part = np.empty((piece.frames, self._dataset.latent_channels), np.float32)
            self._dataset.load_latents(piece.sample, part, piece.start)
            found.append(part)
        return np.concatenate(found)


def shortened(pieces: Sequence[Piece], frames: int) -> list[Piece]:
    """The first frames of a reference."""
    kept = []
    for piece in pieces:
        if frames > 0:
            kept.append(piece._replace(frames=min(piece.frames, frames)))
        frames -= piece.frames
    return kept


def _cut(samples: list[int], frames: list[int], start: int, stop: int) -> list[Piece]:
    """Frames [start, stop) of the samples' joined latents."""
    pieces, before = [], 0
    for sample, length in zip(samples, frames, strict=True):
        low, high = max(start, before), min(stop, before + length)
        if low < high:
            pieces.append(Piece(sample, low - before, high - low))
        before += length
    return pieces

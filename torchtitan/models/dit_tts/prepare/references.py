"""Which utterances a sample's speaker reference is made of, and which part of them.

References are other training utterances of the speaker: never the sample itself, and for a held-out
sample never a held-out one, so that evaluating needs nothing which training has not seen. Only who
has no other training utterance gets a part of itself, half of it at most: the whole would let a
model copy its target from the reference.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan.models.dit_tts.files import atomic_file
from torchtitan.models.dit_tts.prepare.chunk_file import ChunkHeader
from torchtitan.models.dit_tts.prepare.recordings import SPLITS

_COLUMNS = {
    "chunk": np.int32,  # number of its chunk
    "start": np.int64,  # frames before it in the chunk
    "frames": np.int32,
    "given_frames": np.int32,  # of a reference that the source gave
    "speaker": np.int32,
    "split": np.int8,  # index in SPLITS
    "key_end": np.int64,  # where its key ends in the joined keys
}
_KEYS = "keys"


@dataclass(frozen=True)
class Span:
    """`frames` latent frames from frame `start` of sample number `sample`."""

    sample: int
    start: int
    frames: int


class SampleTable:
    """Columns over all kept samples, in the order of the list; small beside the latents.

    Attributes:
        columns: name -> array, a row a sample, as in ``_COLUMNS``.
        data_offset: where the latents begin in each chunk's file, in bytes.
    """

    def __init__(self, columns: dict[str, np.ndarray], keys: np.ndarray, data_offset: np.ndarray):
        self.columns, self._keys, self.data_offset = columns, keys, data_offset
        train = columns["split"] == SPLITS.index("train")
        # Training samples by speaker, in the order of the list within each.
        speaker = columns["speaker"]
        numbers = np.flatnonzero(train)
        self._by_speaker = numbers[np.argsort(speaker[numbers], kind="stable")]
        counts = np.bincount(speaker[numbers], minlength=int(speaker.max(initial=-1)) + 1)
        self._last = np.cumsum(counts)
        self._first = self._last - counts

    def __len__(self) -> int:
        return len(self.columns["frames"])

    def key(self, sample: int) -> str:
        end = self.columns["key_end"]
        start = int(end[sample - 1]) if sample else 0
        return bytes(self._keys[start : int(end[sample])]).decode("utf-8")

    def in_split(self, split: str) -> np.ndarray:
        """Numbers of the samples of a split."""
        return np.flatnonzero(self.columns["split"] == SPLITS.index(split))

    def same_speaker(self, sample: int) -> np.ndarray:
        """Numbers of the training samples of a sample's speaker, in order, itself included."""
        speaker = int(self.columns["speaker"][sample])
        return self._by_speaker[self._first[speaker] : self._last[speaker]]

    def own_crops(self) -> int:
        """Samples whose reference has to be a part of themselves."""
        speaker = self.columns["speaker"]
        others = (self._last - self._first)[speaker] - (self.columns["split"] == 0)
        return int(((others == 0) & (self.columns["given_frames"] == 0)).sum())

    def save(self, folder: Path) -> None:
        """Write the columns as .npy files, for workers to map."""
        folder.mkdir(exist_ok=True)
        arrays = self.columns | {_KEYS: self._keys, "data_offset": self.data_offset}
        for name, array in arrays.items():
            with atomic_file(folder / f"{name}.npy") as file:
                np.save(file, array)

    @classmethod
    def open(cls, folder: Path) -> "SampleTable":
        def column(name: str) -> np.ndarray:
            return np.load(folder / f"{name}.npy", mmap_mode="r")

        return cls({name: column(name) for name in _COLUMNS}, column(_KEYS), column("data_offset"))


class TableBuilder:
    """Collects a SampleTable from the chunks' headers, in their order."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._keys = bytearray()
        self._data_offset: list[int] = []
        self.speakers: dict[str, int] = {}

    def add(self, header: ChunkHeader, data_offset: int) -> None:
        rows = []
        for sample in header.samples:
            self._keys += sample.key.encode("utf-8")
            speaker = self.speakers.setdefault(sample.speaker, len(self.speakers))
            rows.append(
                (
                    len(self._data_offset),
                    sample.start,
                    sample.frames,
                    sample.reference_frames,
                    speaker,
                    SPLITS.index(sample.split),
                    len(self._keys),
                )
            )
        self._rows.append(np.array(rows, dtype=np.int64).reshape(-1, len(_COLUMNS)))
        self._data_offset.append(data_offset)

    def build(self) -> SampleTable:
        rows = np.concatenate(self._rows)
        columns = {
            name: rows[:, number].astype(dtype)
            for number, (name, dtype) in enumerate(_COLUMNS.items())
        }
        keys = np.frombuffer(bytes(self._keys), np.uint8)
        return SampleTable(columns, keys, np.array(self._data_offset, dtype=np.int64))


def choose_references(
    table: SampleTable, sample: int, seed: int, count: int, max_frames: int
) -> list[Span]:
    """The parts, to be joined along time, that a sample's reference is made of.

    `count` different other utterances, fewer where the speaker has fewer, joined and cropped to
    `max_frames` from a random frame on. Which depends on (seed, key) and on the speaker's training
    utterances: other speakers' number or order does not change it.
    """
    key_digest = hashlib.sha256(table.key(sample).encode()).digest()
    random = np.random.default_rng([seed, int.from_bytes(key_digest[:8], "little")])
    candidates = table.same_speaker(sample)
    own = int(np.searchsorted(candidates, sample))
    is_candidate = own < len(candidates) and candidates[own] == sample
    others = len(candidates) - is_candidate
    frames = table.columns["frames"]
    if not others:
        length = min(max(1, int(frames[sample]) // 2), max_frames)
        start = int(random.integers(int(frames[sample]) - length + 1))
        return [Span(sample, start, length)]
    if count == 1:
        drawn = [int(random.integers(others))]
    else:
        drawn = random.choice(others, size=min(count, others), replace=False).tolist()
    chosen = [int(candidates[n + (is_candidate and n >= own)]) for n in drawn]
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

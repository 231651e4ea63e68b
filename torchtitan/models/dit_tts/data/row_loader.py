"""Loads one row of a batch: latents, reference, tokens and their positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.corrupt_samples import CorruptSampleCounter
from torchtitan.models.dit_tts.data.dataset import (
    CorruptSampleError,
    Dataset,
    Fetched,
    LoadedSample,
)
from torchtitan.models.dit_tts.data.references import Piece
from torchtitan.models.dit_tts.errors import InputError

_REFERENCE = [member.name for member in members.ARRAYS].index("reference")

_MAX_ALIGNED = 1 << 18
"""samples whose frames of characters are kept: about 90 MB in each process that reads"""


class Tokenizer(Protocol):
    """The tokenizer's interface for the loader, which calls it from several threads."""

    pad_id: int

    @property
    def aligner(self) -> object | None:
        """Places texts in their recordings; None: `text_positions` is not called."""
        ...

    def max_tokens(self, dataset: Dataset, part: tuple[int, int]) -> np.ndarray:
        """(n,) int32: maximum ids of each sample's row; `part` as in `open_dataset`."""
        ...

    def dropped(self, seed: int, global_batch: int, rows: np.ndarray) -> np.ndarray:
        """(B, conditions) bool: the conditioning tokens that these rows of a batch drop."""
        ...

    def encode_into(
        self, row: np.ndarray, text: str, metadata: Mapping[str, Any], drop: Sequence[bool]
    ) -> int:
        """Write the ids to the start of row (L,) int64 and return their number."""
        ...

    def caption_ids(self, metadata: Mapping[str, Any]) -> list[int]:
        """Ids of a sample's caption; none where it has none."""
        ...

    def text_positions(self, text: str, frames: np.ndarray | None = None) -> np.ndarray:
        """(tokens,) float32: where in the speech the middle of each of the text's ids is, in (0, 1); -1 for those
        that are not text. frames: `aligned_frames` of its recording; None: the expected ones."""
        ...

    def aligned_frames(self, text: str, latents: np.ndarray) -> np.ndarray:
        """(n,) frames of each part of a text in its recording, latents (T, C), as `text_positions` takes them."""
        ...


class Row(NamedTuple):
    """One row of a global batch: its sample, and all that its place in the order decides about it.

    Attributes:
        number: of the row in the global batch, from 0.
        drop: which of the conditioning tokens are dropped.
        crop: which part of a stored reference is taken, as in `fill`.
        verbatim: true where the verbatim text is taken.
        words: random numbers by which a reference is drawn; None: it is not drawn at random.
        max_reference: frames that the reference may have.
        reference: pieces of a drawn reference; none: the stored one.
    """

    number: int
    sample: int
    drop: Sequence[bool]
    crop: int
    verbatim: bool
    words: Sequence[int] | None
    max_reference: int
    reference: Sequence[Piece] = ()


class Target(NamedTuple):
    """The arrays that a row is written into: arrays in the order of `members.ARRAYS`, (T or R, width), text_ids and
    positions (L,), and caption_ids (C,)."""

    arrays: Sequence[np.ndarray]
    text_ids: np.ndarray
    positions: np.ndarray
    caption_ids: np.ndarray


class Loaded(NamedTuple):
    """A row that was written, and how many of its frames, reference frames, and tokens of text and caption are valid."""

    row: Row
    frames: int
    speaker_frames: int
    tokens: int
    caption_tokens: int


@dataclass(frozen=True)
class RowLoader:
    """Fills rows, from several threads at once. `corrupt_samples` judges corrupt pieces of references."""

    dataset: Dataset
    tokenizer: Tokenizer
    corrupt_samples: CorruptSampleCounter
    frames_per_second: float
    _aligned: dict[tuple[int, bool], bytes] = field(default_factory=dict)
    """of the first samples that were read, and of either text, the frames of each character: aligning takes longer than
    reading"""

    def fetch(self, rows: Sequence[Row]) -> Fetched:
        """Fetch those parts of the rows that are stored at URLs, with all requests at once."""
        pieces = [piece.sample for row in rows for piece in row.reference]
        return self.dataset.fetch([row.sample for row in rows], pieces)

    def load(self, row: Row, fetched: Fetched, into: Target) -> Loaded:
        """Write a row. Raises CorruptSampleError where its sample is corrupt."""
        sample = row.sample
        loaded = self._load_sample(row, fetched, into, stored_reference=not row.reference)
        frames, speaker_frames = len(loaded.latents), len(loaded.reference)
        if row.reference:
            speaker_frames = self._load_reference(row, fetched, into)
        self._check_speakers(sample, loaded, speaker_frames, bool(row.reference))
        loaded.metadata["target_duration"] = frames / self.frames_per_second
        text = members.text_of(loaded.metadata, row.verbatim)
        try:
            tokens = self.tokenizer.encode_into(into.text_ids, text, loaded.metadata, row.drop)
        except InputError as error:
            raise InputError(f"sample '{self.dataset.sample_id(sample)}': {error}") from error
        into.positions.fill(-1)
        if self.tokenizer.aligner is not None:
            aligned = self._aligned_frames(sample, row.verbatim, text, loaded.latents)
            into.positions[:tokens] = self.tokenizer.text_positions(text, aligned)
        caption = list[int]()
        if len(into.caption_ids):
            caption = self.tokenizer.caption_ids(loaded.metadata)[: len(into.caption_ids)]
        into.caption_ids[: len(caption)] = caption
        return Loaded(row, frames, speaker_frames, tokens, len(caption))

    def _check_speakers(
        self, sample: int, loaded: LoadedSample, speaker_frames: int, is_drawn: bool
    ) -> None:
        """Raises InputError where a reference that joins recordings is not taken whole: a speaker would be lost."""
        whole = int(self.dataset.reference_frames[sample])
        if members.REFERENCE_PARTS in loaded.metadata and (is_drawn or speaker_frames < whole):
            raise InputError(
                f"sample '{self.dataset.sample_id(sample)}': its reference joins recordings, as of several speakers; set "
                f"[data] references = 'stored', max_reference_ratio = 0 and max_speaker_frames to {whole} or more"
            )

    def _aligned_frames(
        self, sample: int, verbatim: bool, text: str, latents: np.ndarray
    ) -> np.ndarray:
        found = self._aligned.get((sample, verbatim))
        if found is None:
            frames = self.tokenizer.aligned_frames(text, latents)
            found = frames.astype(np.uint16).tobytes()
            if len(self._aligned) < _MAX_ALIGNED:
                self._aligned[sample, verbatim] = found
        return np.frombuffer(found, np.uint16)

    def _load_sample(
        self, row: Row, fetched: Fetched, into: Target, stored_reference: bool = True
    ) -> LoadedSample:
        """Write a sample's arrays, and zeros behind them; the reference only if the stored one is taken."""
        arrays = list(into.arrays)
        if not stored_reference:
            arrays[_REFERENCE] = arrays[_REFERENCE][:0]
        loaded = self.dataset.load(row.sample, arrays, fetched.samples.get(row.sample), row.crop)
        for array, target in zip(loaded.arrays, arrays):
            target[len(array) :].fill(0)
        return loaded

    def _load_reference(self, row: Row, fetched: Fetched, into: Target) -> int:
        """Write the joined pieces of a reference, or the stored one where a piece is corrupt; return its frames."""
        target, end = into.arrays[_REFERENCE], 0
        for piece in row.reference:
            try:
                self.dataset.load_latents(
                    piece.sample,
                    target[end : end + piece.frames],
                    piece.start,
                    fetched.latents.get(piece.sample),
                )
            except CorruptSampleError as error:
                self.corrupt_samples.skip(self.dataset, piece.sample, error)
                return len(self._load_sample(row, fetched, into).reference)
            end += piece.frames
        target[end:].fill(0)
        return end

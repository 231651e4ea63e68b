"""Loads one sample into its row of a padded batch: latents, reference, tokens, positions and features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.corrupt_samples import CorruptSampleCounter
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset, LoadedSample
from torchtitan.models.dit_tts.data.references import Piece
from torchtitan.models.dit_tts.errors import InputError

_REFERENCE = [member.name for member in members.ARRAYS].index("reference")


class Tokenizer(Protocol):
    """What the loader asks of a tokenizer, from several threads."""

    pad_id: int
    n_conditions: int
    """conditioning tokens before the text's; asked for with features only"""

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

    def text_positions(self, text: str, frames: np.ndarray | None = None) -> np.ndarray:
        """(tokens,) float32: where in the speech the middle of each of the text's ids is, in (0, 1); -1 for those
        that are not text. frames: `aligned_frames` of its recording; None: the expected ones."""
        ...

    def aligned_frames(self, text: str, latents: np.ndarray) -> np.ndarray:
        """(n,) frames of each part of a text in its recording, latents (T, C), as `text_positions` takes them."""
        ...


class Features(Protocol):
    """A text encoder's features of every sample's text, stored before the run.

    Attributes:
        width: h, of a token's feature.
        tokens: (n,) tokens of each sample's text without its conditioning tokens.
    """

    width: int
    torch_dtype: torch.dtype
    tokens: np.ndarray
    encoder_fingerprint: str

    def read(self, sample: int, out: np.ndarray) -> int:
        """Fill the first rows of out (L, h), which gets their bits, and return their number.

        Raises:
            CorruptSampleError: the stored bytes are not those that were written.
        """
        ...


class Row(NamedTuple):
    """What a sample is written to.

    arrays in the order of `members.ARRAYS`, (T or R, width); text_ids and positions (L,), features (L, h) or
    None, which of the conditioning tokens to drop, which part of a stored reference to take, as in `fill`, the
    pieces of a drawn one, none for the stored one, and whether the verbatim text is taken.
    """

    arrays: Sequence[np.ndarray]
    text_ids: np.ndarray
    positions: np.ndarray
    features: np.ndarray | None
    drop: Sequence[bool]
    crop: int
    reference: Sequence[Piece]
    verbatim: bool


class Fetched(NamedTuple):
    """Bytes of remote samples, and of the latents alone of others, from `Dataset.fetch_with_latents`."""

    samples: dict[int, bytearray]
    latents: dict[int, bytearray]


@dataclass(frozen=True)
class RowLoader:
    """Fills rows, from several threads at once. `corrupt_samples`: what to do about corrupt pieces of references,
    and their count."""

    dataset: Dataset
    tokenizer: Tokenizer
    corrupt_samples: CorruptSampleCounter
    frames_per_second: float
    features: Features | None
    _aligned: dict[tuple[int, bool], bytes] = field(default_factory=dict)
    """of each sample that was read, and of either text, the frames of each character, since aligning takes longer
    than reading"""

    def fetch(self, samples: Sequence[int] | np.ndarray, pieces: Sequence[Piece] = ()) -> Fetched:
        others = [piece.sample for piece in pieces]
        return Fetched(*self.dataset.fetch_with_latents(samples, others))

    def load(self, sample: int, fetched: Fetched, into: Row) -> tuple[int, int, int]:
        """Fill a row with `sample`; return how many frames, speaker frames and tokens are valid."""
        loaded = self._load_sample(sample, fetched, into, stored_reference=not into.reference)
        frames, speaker_frames = len(loaded.latents), len(loaded.reference)
        if into.reference:
            speaker_frames = self._load_reference(sample, fetched, into)
        self._check_speakers(sample, loaded, speaker_frames, bool(into.reference))
        # A cropped sample is as long as its kept frames.
        loaded.metadata["target_duration"] = frames / self.frames_per_second
        stored = None if into.features is None else self._load_features(sample, into.features)
        text = members.text_of(loaded.metadata, into.verbatim)
        try:
            tokens = self.tokenizer.encode_into(into.text_ids, text, loaded.metadata, into.drop)
        except InputError as error:
            raise InputError(f"sample '{self.dataset.sample_id(sample)}': {error}") from error
        if stored not in (None, tokens):
            raise InputError(
                f"sample '{self.dataset.sample_id(sample)}': its text and conditions have {tokens} "
                f"tokens where its stored features are for {stored}; delete the folder of the "
                "features and make them again with titan-tts prepare --encode-text"
            )
        into.positions.fill(-1)
        if self.tokenizer.aligner is not None:
            aligned = self._aligned_frames(sample, into.verbatim, text, loaded.latents)
            found = self.tokenizer.text_positions(text, aligned)
            into.positions[:tokens] = found
        return frames, speaker_frames, tokens

    def _check_speakers(
        self, sample: int, loaded: LoadedSample, speaker_frames: int, is_drawn: bool
    ) -> None:
        """Raises InputError where a reference that joins recordings is not taken whole: a speaker would be lost."""
        whole = int(self.dataset.reference_frames[sample])
        if members.REFERENCE_PARTS in loaded.metadata and (is_drawn or speaker_frames < whole):
            raise InputError(
                f"sample '{self.dataset.sample_id(sample)}': its reference joins recordings, as of several speakers, so "
                f"all of its {whole} frames are needed; set [data] references = 'stored', max_reference_ratio = 0 and "
                f"max_speaker_frames to {whole} or more"
            )

    def _aligned_frames(
        self, sample: int, verbatim: bool, text: str, latents: np.ndarray
    ) -> np.ndarray:
        found = self._aligned.get((sample, verbatim))
        if found is None:
            frames = self.tokenizer.aligned_frames(text, latents)
            found = self._aligned[sample, verbatim] = frames.astype(np.uint16).tobytes()
        return np.frombuffer(found, np.uint16)

    def _load_sample(
        self, sample: int, fetched: Fetched, into: Row, stored_reference: bool = True
    ) -> LoadedSample:
        """A sample in its row, zero behind it. Without its stored reference that row's is left alone."""
        arrays = list(into.arrays)
        if not stored_reference:
            arrays[_REFERENCE] = arrays[_REFERENCE][:0]
        loaded = self.dataset.load(sample, arrays, fetched.samples.get(sample), into.crop)
        for array, target in zip(loaded.arrays, arrays):
            target[len(array) :].fill(0)
        return loaded

    def _load_reference(self, sample: int, fetched: Fetched, into: Row) -> int:
        """Fill a row's reference with the joined pieces, or with the stored one where a piece is corrupt,
        and return its frames."""
        target, end = into.arrays[_REFERENCE], 0
        for piece in into.reference:
            try:
                self.dataset.load_latents(
                    piece.sample,
                    target[end : end + piece.frames],
                    piece.start,
                    fetched.latents.get(piece.sample),
                )
            except CorruptSampleError as error:
                self.corrupt_samples.skip(self.dataset, piece.sample, error)
                return len(self._load_sample(sample, fetched, into).reference)
            end += piece.frames
        target[end:].fill(0)
        return end

    def _load_features(self, sample: int, features: np.ndarray) -> int:
        """Fill features (L, h) and return their number of tokens, conditioning tokens included."""
        assert self.features is not None
        first = self.tokenizer.n_conditions
        end = first + self.features.read(sample, features[first:])
        features[:first].fill(0)
        features[end:].fill(0)
        return end

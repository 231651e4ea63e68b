"""Tokenizers: text and a sample's conditions to token ids and back."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.config.job_config import CONDITIONING_FIELDS
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.members import caption_of, label_of
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.counter_rng import stream_keys, uniform
from torchtitan.models.dit_tts.text.aligner import Aligner, token_positions, unit_spans
from torchtitan.models.dit_tts.text.conventions import (
    ECHO,
    MAX_ADDED_BYTES,
    NORMALIZERS,
    mark_table,
    with_known_marks,
)
from torchtitan.models.dit_tts.text.normalize import Normalizer
from torchtitan.models.dit_tts.text.phones import Phonemizer
from torchtitan.models.dit_tts.text.token_counts import count_letters, count_text_tokens
from torchtitan.models.dit_tts.text.vocabulary import (
    BEGIN_ID,
    END_ID,
    FIRST_BYTE_ID,
    FIRST_CHARACTER_ID,
    PAD_ID,
    UNKNOWN_CHARACTER_ID,
    Vocabulary,
)

NOTHING: Mapping[str, Any] = {}

# Apart from the objective's streams (from 0) and the sampler's (100). By name, so that a field is
# dropped from the same samples whichever other fields there are.
_DROPOUT_STREAMS = {name: 200 + number for number, name in enumerate(CONDITIONING_FIELDS)}


def with_duration(
    metadata: Mapping[str, Any], frames: int, frames_per_second: float
) -> dict[str, Any]:
    """A sample's metadata with the duration of `frames` latent frames, in training as in generation."""
    return {**metadata, "target_duration": frames / frames_per_second}


def unicode_bytes(text: str) -> bytes:
    """The text in UTF-8."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text has {text[error.start]!r} at character {error.start}, half of a surrogate pair"
        ) from error


class ConditionedTokenizer(BaseTokenizer):
    """A tokenizer of text that also gives ids of conditioning tokens, in the config's order; from any thread. A condition
    that is missing, dropped, or of an unknown value, becomes its field's unknown token."""

    pad_id = PAD_ID
    begin: Sequence[int] = ()
    end: Sequence[int] = ()
    """ids before the conditioning tokens and behind the text"""

    def __init__(
        self,
        vocabulary: Vocabulary,
        conditioning_dropout: float = 0.0,
        aligner: Aligner | None = None,
    ):
        """conditioning_dropout: probability at which `dropped` drops each condition. aligner: of the run."""
        super().__init__()
        self.vocabulary = vocabulary
        self.aligner = aligner
        self.conditioning_dropout = conditioning_dropout
        self.vocab_size = vocabulary.size
        self.added = AddedTokens(vocabulary.added)
        self.words = Normalizer(vocabulary.normalize, self.added)
        """what is read of a text, before letters or phones"""
        self.fields = tuple(vocabulary.conditioning)
        self.n_conditions = len(self.fields)
        """conditioning tokens in each row"""
        unknown = vocabulary.unknown_ids()
        self._conditions = [
            (
                name,
                {value: number for number, value in enumerate(values, unknown[name] + 1)},
                unknown[name],
            )
            for name, values in vocabulary.conditioning.items()
        ]

    def get_vocab_size(self) -> int:
        return self.vocab_size

    @abstractmethod
    def text_ids(self, text: str) -> list[int]:
        """Ids of a text alone."""

    def encode(
        self, text: str, metadata: Mapping[str, Any] = NOTHING, drop: Sequence[bool] = ()
    ) -> list[int]:
        """Ids of one sample. `metadata`: its JSON; `drop`: for each of `fields`, whether it becomes unknown; empty: none."""
        return [*self.begin, *self.condition_ids(metadata, drop), *self.text_ids(text), *self.end]

    def caption_ids(self, metadata: Mapping[str, Any]) -> list[int]:
        """Ids of a sample's caption, none where it has none: its bytes in UTF-8, whatever the units of texts are."""
        return list(caption_of(metadata).encode("utf-8", "replace"))

    def encode_into(
        self,
        row: np.ndarray,
        text: str,
        metadata: Mapping[str, Any] = NOTHING,
        drop: Sequence[bool] = (),
    ) -> int:
        """Writes a sample's ids to the start of `row` (L,) int64 and leaves the rest as it is; arguments as of `encode`."""
        ids = self.encode(text, metadata, drop)
        if len(ids) > len(row):
            raise InputError(f"the text has {len(ids)} tokens, but at most {len(row)} fit")
        row[: len(ids)] = ids
        return len(ids)

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Upstream's; no part of training or generation turns ids into text."""
        raise NotImplementedError

    @abstractmethod
    def max_tokens(self, dataset: Dataset, part: tuple[int, int] = (0, 1)) -> np.ndarray:
        """(n,) int32: maximum number of ids of each sample; `part` as in `open_dataset`."""

    def spoken(self, text: str) -> str:
        """The characters that an alignment places: those of the text as words, or its phones, and one per added token."""
        return self.added.joined(self.words(text))

    @abstractmethod
    def text_spans(self, text: str) -> np.ndarray:
        """(tokens, 2) float64 for each of `text_ids`: where its first character begins and its last one ends, in
        characters of `spoken`; equal for special tokens."""

    def spans(self, text: str) -> np.ndarray:
        """(tokens, 2) float64 for each id of `encode`; 0 for conditioning tokens and those around the text."""
        around = len(self.begin) + self.n_conditions, len(self.end)
        return np.pad(self.text_spans(text), (around, (0, 0)))

    def aligned_frames(self, text: str, latents: np.ndarray) -> np.ndarray:
        """(characters + 2,) int64 frames of each character of `spoken` in the recording latents (T, C)."""
        assert self.aligner is not None
        return self.aligner.frames(self.spoken(text), latents)

    def text_positions(self, text: str, frames: np.ndarray | None = None) -> np.ndarray:
        """(tokens,) float32 in (0, 1), -1 for special and conditioning tokens: where in the speech the middle of each id
        of `encode` is. `frames`: `aligned_frames` of its recording; None: those that the aligner expects."""
        if frames is None:
            assert self.aligner is not None
            frames = self.aligner.expected_frames(self.spoken(text))
        return token_positions(frames, self.spans(text))

    @abstractmethod
    def unknown_characters(self, text: str) -> list[str]:
        """The text's characters that the vocabulary does not have or that phones lose, each once."""

    def dropped(self, seed: int, global_batch: int, rows: np.ndarray) -> np.ndarray:
        """(B, fields) bool: which conditions training drops in these rows (B,) of a global batch, a pure function of their
        position in the stream."""
        found = np.zeros((len(rows), len(self.fields)), bool)
        if self.conditioning_dropout:
            position = torch.tensor(global_batch), torch.as_tensor(rows, dtype=torch.int64)
            for column, name in enumerate(self.fields):
                drawn = uniform(stream_keys(seed, *position, _DROPOUT_STREAMS[name]))
                found[:, column] = (drawn < self.conditioning_dropout).numpy()
        return found

    def value_of(self, metadata: Mapping[str, Any], name: str) -> str | None:
        """A sample's value of a field, known or not; None where it has none."""
        if name != "duration":
            return label_of(metadata, name)
        seconds = metadata.get("target_duration")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            return None
        return self.vocabulary.duration_bin(seconds) if 0 < seconds < math.inf else None

    def unknown_values(self, metadata: Mapping[str, Any]) -> dict[str, str]:
        """The sample's values that the vocabulary does not have, by field."""
        values = ((name, self.value_of(metadata, name)) for name in self.fields)
        known = self.vocabulary.conditioning
        return {name: each for name, each in values if each is not None and each not in known[name]}

    def condition_ids(self, metadata: Mapping[str, Any], drop: Sequence[bool]) -> list[int]:
        """One for each of `fields`; see `encode`."""
        ids = []
        for column, (name, known, unknown) in enumerate(self._conditions):
            value = None if len(drop) and drop[column] else self.value_of(metadata, name)
            ids.append(unknown if value is None else known.get(value, unknown))
        return ids


class UnitTokenizer(ConditionedTokenizer):
    """Ids for the learned encoder: begin, the conditioning tokens, bytes or characters, end (Echo-TTS has none)."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        conditioning_dropout: float = 0.0,
        aligner: Aligner | None = None,
    ):
        super().__init__(vocabulary, conditioning_dropout, aligner)
        is_echo = vocabulary.convention == ECHO
        self.begin, self.end = (BEGIN_ID,), () if is_echo else (END_ID,)
        self._normalized = NORMALIZERS[vocabulary.convention]
        self._most_added = 1 + self.n_conditions + (MAX_ADDED_BYTES if is_echo else 1)
        self._bytes = vocabulary.unit == "bytes"
        language = vocabulary.language
        self._phones = Phonemizer(language, self.added) if language else None
        letters = [*vocabulary.characters, *self.added.characters]
        self._id_of_letter = {c: n for n, c in enumerate(letters, FIRST_CHARACTER_ID)}
        self._marks = {} if self._bytes else mark_table(self._id_of_letter, bool(language))
        first = vocabulary.first_added_id
        self._id_of_added = {token: n for n, token in enumerate(self.added.tokens, first)}

    def spoken(self, text: str) -> str:
        if self._phones is None:
            return with_known_marks(super().spoken(text), self._marks)
        unicode_bytes(text)
        return with_known_marks(self._phones(self.words(text)), self._marks)

    def text_spans(self, text: str) -> np.ndarray:
        text = self.spoken(text)
        added = self.added.characters
        return unit_spans(
            [len(unicode_bytes(c)) if self._bytes and c not in added else 1 for c in text]
        )

    def max_tokens(self, dataset: Dataset, part: tuple[int, int] = (0, 1)) -> np.ndarray:
        if self._phones is not None:
            units = count_text_tokens(dataset, self._phones, part, self.words)
        else:
            units = count_letters(dataset, "bytes" if self._bytes else "chars", part, self.words)
        return units + np.int32(self._most_added)

    def text_ids(self, text: str) -> list[int]:
        unicode_bytes(text)
        if not self._bytes:  # no convention has these
            return [self._id_of_letter.get(c, UNKNOWN_CHARACTER_ID) for c in self.spoken(text)]
        ids = []
        for part, token in self.added.pieces(self._normalized(self.words(text))):
            if token:
                ids.append(self._id_of_added[token])
            else:
                ids += [byte + FIRST_BYTE_ID for byte in unicode_bytes(part)]
        return ids

    def unknown_characters(self, text: str) -> list[str]:
        unknown = [] if self._bytes else sorted({*self.spoken(text)} - self._id_of_letter.keys())
        return (self._phones.lost(text) if self._phones else []) or unknown

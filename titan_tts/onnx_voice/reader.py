"""Texts to the ids of a voice and their places in the speech, by those parts of the tokenizer that need no torch."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import numpy as np

from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.text import english
from torchtitan.models.dit_tts.text.aligner import Aligner, token_positions, unit_spans
from torchtitan.models.dit_tts.text.normalize import TO_SAY, Normalizer
from torchtitan.models.dit_tts.text.phones import Phonemizer


class Reader:
    """Reads texts as a `UnitTokenizer` without conditions and added tokens does."""

    def __init__(
        self,
        ids: Mapping[str, int],
        ends: Sequence[int],
        in_bytes: bool,
        language: str,
        normalize: str,
        aligner: Aligner | None = None,
    ):
        """ids: of characters; bytes are those of Latin 1. ends: the ids before and after a text. Others: as of a
        `Vocabulary`."""
        self._ids = {character: np.int64(number) for character, number in ids.items()}
        (self._begin, self._end), self._in_bytes, self._aligner = ends, in_bytes, aligner
        # Without wetext, whose grammars take 45 MB, texts in which it reads nothing are read.
        self._words = None if normalize and not find_spec("wetext") else Normalizer(normalize)
        self._normalize = normalize
        self._phones = Phonemizer(language) if language else None

    def __call__(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(L,) int64 ids and (L,) float32 positions of a text, -1 for what is not text. Raises InputError for characters that
        the voice does not know."""
        whole = text.encode("utf-8", "replace").decode()
        words = self._words(whole) if self._words else self._as_written(whole)
        spoken = self._phones(words) if self._phones else words
        units = [c.encode().decode("latin-1") if self._in_bytes else c for c in spoken]
        unknown = sorted(set("".join(units)) - self._ids.keys())
        lost = (self._phones.lost(whole) if self._phones else []) or unknown
        shown = ", ".join(map(repr, lost[:5]))
        require(not lost, f"the voice was not trained with the characters {shown}; leave them out")
        ids = [self._begin, *(self._ids[unit] for unit in "".join(units)), self._end]
        positions = np.full(len(ids), -1.0, np.float32)
        if self._aligner is not None:
            frames = self._aligner.expected_frames(spoken)
            positions[1:-1] = token_positions(frames, unit_spans([*map(len, units)]))
        return np.array(ids, np.int64), positions

    def _as_written(self, text: str) -> str:
        text = english.prepared(text) if self._normalize == "en" else text
        found = TO_SAY.search(text)
        about = f"the text has {found and found[0]!r}, which wetext reads as words"
        require(not found, f"{about}; pip install wetext==0.1.8, or write words")
        return text.replace(english.CUT, "")

"""Tokenizers of pretrained text encoders, with conditioning tokens before the text. Nothing here pads."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.bounded import parse_json, read_json_file
from torchtitan.models.dit_tts.config.job_config import LEARNED_SUBWORDS, is_pretrained
from torchtitan.models.dit_tts.data.dataset import Dataset
from torchtitan.models.dit_tts.data.members import caption_of
from torchtitan.models.dit_tts.errors import InputError, first_line
from torchtitan.models.dit_tts.files import load_local_or_hub
from torchtitan.models.dit_tts.text.aligner import Aligner
from torchtitan.models.dit_tts.text.conventions import IRODORI, NORMALIZERS
from torchtitan.models.dit_tts.text.hf_encoder import download_by_hand, find_source
from torchtitan.models.dit_tts.text.token_counts import count_text_tokens
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer, unicode_bytes
from torchtitan.models.dit_tts.text.vocabulary import SUBWORDS, Subwords, Vocabulary

if TYPE_CHECKING:  # runs with the learned encoder do without the library
    from tokenizers import Tokenizer

# Where a model's own files are missing, transformers makes a tokenizer of special tokens alone.
_MIN_PIECES = 16


class TextTokenizer:
    """A Hugging Face tokenizer whose ids depend on the text alone: no truncation, padding or dropout, and special
    tokens from its own rules. Any thread may use it."""

    def __init__(
        self,
        serialized: str,
        added: AddedTokens | None = None,
        first_id: int = 0,
        convention: str = "",
    ):
        """serialized: JSON of the `tokenizers` library; raises ValueError where it is not valid. added: tokens beyond the
        model's own, with ids from `first_id` on. convention: [encoder] convention."""
        from tokenizers import AddedToken, Tokenizer

        contents = parse_json(serialized)
        try:
            backend = Tokenizer.from_str(serialized)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(str(error)) from error
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None
        self._backend = backend
        # Of what was given, as another version of the library may serialize it differently.
        self.fingerprint = _fingerprint(contents)
        self._unknown = _unknown_id(contents["model"], backend)
        special = {i for i, each in backend.get_added_tokens_decoder().items() if each.special}
        pieces = set(backend.get_vocab(with_added_tokens=True).values()) - special
        self.num_pieces = len(pieces)
        """number of ids for letters of a text"""
        self.end = max([*pieces, *backend.encode("").ids], default=-1) + 1
        """1 + the highest id of its own that a text can have"""
        self._normalized = NORMALIZERS[convention]
        self.fingerprint += convention and f"-{convention}"
        self._id_of: dict[int, int] = {}
        if added is not None and added.tokens:
            backend.add_tokens([AddedToken(token, normalized=False) for token in added.tokens])
            own = [cast(int, backend.token_to_id(token)) for token in added.tokens]
            self._id_of = {each: number for number, each in enumerate(own, first_id)}
            self.fingerprint += added.fingerprint

    def to_json(self) -> str:
        return self._backend.to_str()

    def ids(self, text: str) -> list[int]:
        """Ids of a text with the model's special tokens."""
        unicode_bytes(text)
        found = self._backend.encode(self._normalized(text)).ids
        return [self._id_of.get(each, each) for each in found] if self._id_of else found

    def plain_ids(self, text: str) -> list[int]:
        """`ids` of what no convention changes."""
        return self._backend.encode(text).ids

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Number of ids of each text."""
        normalized = list(map(self._normalized, texts))
        return list(map(len, self._backend.encode_batch_fast(normalized)))

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """(first character, the one after the last) of each of `ids`; equal for special tokens. The text is taken as
        it is: no convention has positions."""
        return self._backend.encode(text).offsets

    def unknown_characters(self, text: str) -> list[str]:
        """The text's characters that have no id of their own, each once."""
        if self._unknown is None:
            return []
        unicode_bytes(text)
        text = self._normalized(text)
        encoding = self._backend.encode(text)
        offsets = zip(encoding.ids, encoding.offsets, strict=True)
        # Some models read a word as unknown for one of its characters.
        seen = {c for i, (start, end) in offsets if i == self._unknown for c in text[start:end]}
        return sorted(c for c in seen if self._unknown in self._backend.encode(c).ids)


class SubwordTokenizer(ConditionedTokenizer):
    """Ids of the conditioning tokens, then the ids of a pretrained encoder's tokenizer with its special
    tokens."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        text: TextTokenizer,
        conditioning_dropout: float = 0.0,
        aligner: Aligner | None = None,
    ):
        """Raises InputError where a text can have ids that the encoder's embedding lacks."""
        super().__init__(vocabulary, conditioning_dropout, aligner)
        assert vocabulary.subwords is not None
        self.base = vocabulary.first_added_id
        self.pad_id = vocabulary.subwords.pad_id
        self.text_fingerprint = text.fingerprint
        self.text, convention = text, vocabulary.convention
        if self.added.tokens or convention:
            self.text = TextTokenizer(text.to_json(), self.added, self.base, convention)
        if text.end > self.base:
            raise InputError(
                f"[encoder] model = {vocabulary.model!r}: its tokenizer has ids up to {text.end - 1}, but its config has "
                f"vocab_size = {self.base}; give a folder whose files belong together"
            )

    def text_ids(self, text: str) -> list[int]:
        return self.text.ids(self.words(text))

    def caption_ids(self, metadata: Mapping[str, Any]) -> list[int]:
        """In Irodori-TTS's models the pieces of texts."""
        if self.vocabulary.convention != IRODORI:
            return super().caption_ids(metadata)
        caption = caption_of(metadata)
        return self.text.plain_ids(caption) if caption else []

    def max_tokens(self, dataset: Dataset, part: tuple[int, int] = (0, 1)) -> np.ndarray:
        units = count_text_tokens(dataset, self.text, part, self.words)
        return units + np.int32(self.n_conditions)

    def text_spans(self, text: str) -> np.ndarray:
        text = self.words(text)
        places = self.added.places(text)
        offsets = [(places[begin], places[end]) for begin, end in self.text.offsets(text)]
        return np.array(offsets, np.float64).reshape(-1, 2)

    def unknown_characters(self, text: str) -> list[str]:
        return self.text.unknown_characters(self.words(text))


def load_subword_tokenizer(model: str) -> SubwordTokenizer:
    """The tokenizer of a pretrained encoder, without conditioning. `model`: hub name or folder, behind LEARNED_SUBWORDS
    where only its tokenizer is used."""
    if is_pretrained(model):
        source = find_source(model)
        model, size = source.model, source.vocab_size
        found, text = _load_tokenizer(model)
    else:
        found, text = _load_tokenizer(model.removeprefix(LEARNED_SUBWORDS))
        text, size = _begun_text(text, found.bos_token, found.bos_token_id), len(found)
    subwords = Subwords(size, text.fingerprint, found.pad_token_id or 0, model)
    return SubwordTokenizer(Vocabulary(SUBWORDS, subwords=subwords), text)


def _begun_text(text: TextTokenizer, begin: str | None, begin_id: int | None) -> TextTokenizer:
    """The tokenizer with no other special token than this one before each text; None: without any."""
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(text.to_json())
    backend.post_processor = None  # type: ignore[assignment]
    if begin is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B:1", special_tokens=[(begin, begin_id)]
        )
    return TextTokenizer(backend.to_str())


def _load_tokenizer(model: str) -> tuple[Any, TextTokenizer]:
    """The library's tokenizer of a folder or hub name, and ours."""
    from transformers import AutoTokenizer

    def load(**where: Any) -> tuple[Any, TextTokenizer]:
        found = AutoTokenizer.from_pretrained(model, trust_remote_code=False, **where)
        backend = getattr(found, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("it is written in Python; one with a tokenizer.json is needed")
        text, kind = TextTokenizer(backend.to_str()), type(backend.model).__name__
        if stored not in ("", kind):
            raise ValueError(f"a model of this type is read with a {kind}")
        if text.num_pieces < _MIN_PIECES:
            few = f"it has {text.num_pieces} pieces for letters, and needs {_MIN_PIECES}"
            raise ValueError(f"{few}, as where its vocabulary's files are missing")
        return found, text

    stored = ""
    with suppress(OSError, ValueError, LookupError, TypeError):
        stored = str(read_json_file(Path(model, "tokenizer.json"))["model"]["type"])[:40]

    try:
        return load_local_or_hub(load, model)
    except Exception as error:  # the kind depends on the file
        why = first_line(error) + (f"; its tokenizer.json holds a {stored}" if stored else "")
        raise InputError(
            f"[encoder] model = {model!r}: its tokenizer cannot be loaded ({why}); {download_by_hand(model)}"
        ) from error


def _unknown_id(model: dict[str, Any], backend: "Tokenizer") -> int | None:
    """The id of what has no other id; None where there is none, or its bytes have ids."""
    if model.get("byte_fallback"):
        return None
    if model.get("unk_id") is not None:
        return model["unk_id"]
    token = model.get("unk_token")
    return None if token is None else backend.token_to_id(token)


def _fingerprint(contents: dict[str, Any]) -> str:
    """16 hex digits of everything that the ids depend on."""
    model = contents["model"] | {"dropout": None}
    contents = contents | {"truncation": None, "padding": None, "model": model}
    canonical = json.dumps(_without_defaults(contents))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _without_defaults(contents: Any) -> Any:
    """Sorted by name and without empty fields, so that a version of the library that adds or moves a
    field gives the same fingerprint."""
    if isinstance(contents, dict):
        return {
            # Pieces, up to half a million, are in the order of their ids.
            name: value if name in ("vocab", "merges") else _without_defaults(value)
            for name, value in sorted(contents.items())
            if value is not None and value is not False
        }
    if isinstance(contents, list):
        return [_without_defaults(value) for value in contents]
    return contents

"""Text as phones, in the letters of the International Phonetic Alphabet, by espeak-ng."""

import logging
import threading
import unicodedata
from collections import Counter
from functools import cached_property, lru_cache
from itertools import chain
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.errors import InputError

if TYPE_CHECKING:  # what speaks by onnxruntime reads phones without torch
    from torchtitan.models.dit_tts.data.dataset import Dataset

_KEPT = 2**18  # texts whose phones stay in memory, about 60 MB: a text comes again in every epoch
_TEXTS_AT_ONCE = 1024

_UNREAD = "𐌰ⲁߒ"
"""letters that no language of espeak-ng reads, whose code points begin with different digits: it says "letter 1 0 3 ..." """

_STEPS = (610, 377, 233, 144, 89, 55, 34, 21, 13, 8, 5, 3, 2, 1)
"""distances to other letters of a script, the far ones first: neighbours may begin alike, as Korean syllables do"""

_OTHERS, _NAME_PHONES = 4, 4
"""letters to compare one with, and phones that all of them begin with where these name the script: "Hebrew shin" """


class Phonemizer:
    """A text's phones in one language, with stress and punctuation; from any thread."""

    def __init__(self, language: str, added: AddedTokens | None = None):
        """language: espeak-ng's name, such as "en-us". added: tokens of the text, which are a character each. Raises InputError
        where the library is not installed, or does not know the language."""
        try:
            import espeakng_loader
            from phonemizer.backend import EspeakBackend
            from phonemizer.backend.espeak.wrapper import EspeakWrapper
        except ImportError as error:
            raise InputError(
                f"[encoder] model = 'phones:{language}' needs espeak-ng: pip install phonemizer "
                "espeakng_loader"
            ) from error
        EspeakWrapper.set_library(espeakng_loader.get_library_path())
        EspeakWrapper.set_data_path(espeakng_loader.get_data_path())
        if not EspeakBackend.is_supported_language(language):
            known = ", ".join(sorted(EspeakBackend.supported_languages()))
            raise InputError(
                f"[encoder] model = 'phones:{language}', but espeak-ng has no language {language!r}; give one of: {known}"
            )
        self.language = language
        self._added = added or AddedTokens(())
        self._backend = EspeakBackend(
            language,
            preserve_punctuation=True,
            with_stress=True,
            language_switch="remove-flags",
            # It warns where espeak-ng joins words, as in "in the", which is not a mistake.
            logger=logging.Logger("phonemizer", logging.ERROR),
        )
        self._lock = threading.Lock()  # espeak-ng has one state per process
        self._kept = lru_cache(_KEPT)(self._phones)
        self._is_lost = lru_cache(_KEPT)(self._find_lost)

    def __call__(self, text: str) -> str:
        # Half of a surrogate pair, which a tokenizer refuses, ends no count.
        whole = text.encode("utf-8", "replace").decode().replace("\0", " ")  # where C ends a text
        return self._kept(" ".join(whole.split()))

    def _phones(self, text: str) -> str:
        spoken = []
        with self._lock:
            for part, token in self._added.pieces(text):
                if not token and part.strip():
                    # Of "about 3.5." phonemizer makes two, as if a text ended behind 3.
                    part = " ".join(self._backend.phonemize([part.strip()], strip=True))
                spoken.append(part.strip())
        return "".join(spoken)

    def lost(self, text: str) -> list[str]:
        """The text's letters that espeak-ng does not read, each once: it says what their script is called, which is the
        same for all words ("Chinese letter Chinese letter"), or nothing."""
        return [c for c in dict.fromkeys(self._added.without(text)) if self._is_lost(c)]

    def _find_lost(self, letter: str) -> bool:
        """True where espeak-ng says nothing to a letter, or begins as it does for others of its script ("Hebrew shin"),
        or with its word for unknown letters."""
        script = _script_of(letter)
        if not script or letter.isascii():
            return False
        said = self._sounds(letter)
        points = (ord(letter) + sign * step for step in _STEPS for sign in (1, -1))
        near = (chr(point) for point in points if 0 < point < 0x110000)
        others = [c for c in near if _script_of(c) == script and c.lower() != letter.lower()]
        name = commonprefix([said, *map(self._sounds, others[:_OTHERS])])
        is_name = bool(others) and len(name) >= _NAME_PHONES
        return not said or is_name or bool(self._letter and self._letter in said)

    @cached_property
    def _letter(self) -> str:
        """The word that espeak-ng says to unknown letters."""
        return commonprefix(list(map(self._sounds, _UNREAD)))

    def _sounds(self, text: str) -> str:
        """The phones without stress and blanks."""
        return self(text).translate({ord(mark): None for mark in "ˈˌ "})

    @cached_property
    def fingerprint(self) -> str:
        """Language, version of espeak-ng and added tokens."""
        version: Any = self._backend.version()
        return f"{self.language}-{'.'.join(map(str, version))}{self._added.fingerprint}"

    def counts(self, texts: list[str]) -> list[int]:
        """Number of phones of each text."""
        return [len(self(text)) for text in texts]


def _script_of(character: str) -> str:
    """HEBREW or CJK; empty for what is not a letter, or modifies the one before it, such as the Japanese "ー"."""
    is_letter = unicodedata.category(character) in ("Lu", "Ll", "Lt", "Lo")
    return unicodedata.name(character, "").partition(" ")[0] if is_letter else ""


def lost_letters(dataset: "Dataset", phones: Phonemizer) -> dict[int, list[str]]:
    """The samples whose texts have letters that `phones` loses, and these letters. Texts are read only where the data
    has a letter that may be lost."""
    from torchtitan.models.dit_tts.text.token_counts import read_texts

    found: dict[int, list[str]] = {}
    if phones.lost(dataset.characters):
        for first in range(0, len(dataset), _TEXTS_AT_ONCE):
            chunk = range(first, min(first + _TEXTS_AT_ONCE, len(dataset)))
            for texts in read_texts(dataset, chunk):
                lost = map(phones.lost, (text or "" for text in texts))
                found |= {sample: letters for sample, letters in zip(chunk, lost) if letters}
    return found


def check_letters(dataset: "Dataset", phones: Phonemizer) -> None:
    """Raises InputError where texts have letters that `phones` loses, for a model could not tell their words apart."""
    if lost := lost_letters(dataset, phones):
        by_name = {dataset.sample_id(sample): letters for sample, letters in lost.items()}
        raise lost_letters_error("[encoder] model", phones, by_name, len(dataset))


def lost_letters_error(
    key: str, phones: Phonemizer, lost: dict[str, list[str]], texts: int
) -> InputError:
    """The error of texts with letters that `phones` loses: {recording: its letters}, of so many texts; `key` is what
    named the language."""
    from torchtitan.models.dit_tts.text.vocabulary import named

    letters = [letter for letter, _ in Counter(chain(*lost.values())).most_common()]
    return InputError(
        f"{key} = 'phones:{phones.language}', but in {len(lost)} of {texts} texts espeak-ng reads letters as the name of "
        f"their script or not at all ({named(letters)}; {next(iter(lost))}); set it to 'chars' or 'bytes', or prepare texts "
        f"without them, with these words written as they are said"
    )

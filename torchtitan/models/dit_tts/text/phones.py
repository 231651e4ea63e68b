"""Text as phones, in the letters of the International Phonetic Alphabet, by espeak-ng."""

import logging
import threading
from functools import cached_property, lru_cache
from typing import Any

from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.errors import InputError

_KEPT = 2**18
"""texts whose phones stay in memory, about 60 MB: a text comes again in every epoch"""


class Phonemizer:
    """A text's phones in one language, with stress and punctuation; from any thread."""

    def __init__(self, language: str, added: AddedTokens | None = None):
        """
        Args:
            language: espeak-ng's name, such as "en-us" or "de".
            added: tokens of the text, which are no phones but a character each.

        Raises:
            InputError: the library is not installed, or does not know the language.
        """
        try:
            import espeakng_loader
            from phonemizer.backend import EspeakBackend
            from phonemizer.backend.espeak.wrapper import EspeakWrapper
        except ImportError as error:
            raise InputError(
                f"[encoder] model = 'phones:{language}' needs espeak-ng; install it with: pip install "
                f"'titan-tts[phones]'"
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
            # It warns where espeak-ng joins words, as in "in the", which is no mistake.
            logger=logging.Logger("phonemizer", logging.ERROR),
        )
        self._lock = threading.Lock()  # espeak-ng has one state per process
        self._kept = lru_cache(_KEPT)(self._phones)

    def __call__(self, text: str) -> str:
        return self._kept(" ".join(text.split()))

    def _phones(self, text: str) -> str:
        spoken = []
        with self._lock:
            for part, token in self._added.pieces(text):
                if not token and part.strip():
                    [part] = self._backend.phonemize([part.strip()], strip=True)
                spoken.append(part.strip())
        return "".join(spoken)

    @cached_property
    def fingerprint(self) -> str:
        """Of language, version of espeak-ng and added tokens."""
        version: Any = self._backend.version()
        return f"{self.language}-{'.'.join(map(str, version))}{self._added.fingerprint}"

    def counts(self, texts: list[str]) -> list[int]:
        """Number of phones of each text."""
        return [len(self(text)) for text in texts]

"""Numbers, dates, units, currency and abbreviations as the words that are said: [encoder] normalize, by wetext.

What has no digit, sign or known abbreviation stays as it is.
"""

import re
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec

from torchtitan.models.dit_tts.added_tokens import NO_TOKENS, AddedTokens
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.text import english

LANGUAGES = ("en", "zh", "ja")
"""of wetext's grammars"""

_KEPT = 2**17  # texts in memory, about 40 MB: a text comes again in every epoch

# The grammars refuse, escape or move some of these characters.
_CUTS = re.compile(
    r"(\s*(?:[\[\](){}<>\"“”„«»\\|_…\n\t\v]|[,;:!?](?=\s|$)|[。，、！？；：])\s*|\s{2,}|^\s+|\s+$)"
)
TO_SAY = re.compile(r"[\d$£€¥￥%&@#=°½¼¾²³]|www\.|://")
"""where the grammar has something to read"""

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Normalizer:
    """Writes the numbers, dates, units and abbreviations of a text as words. Threads may share one."""

    def __init__(self, language: str, added: AddedTokens = NO_TOKENS):
        """
        Args:
            language: one of LANGUAGES; empty: texts stay as they are.
            added: tokens of a text, which stay as they are.

        Raises:
            InputError: the language is another, or wetext is not installed.
        """
        self.language, self.added = language, added
        self._read = _reader(language) if language else str
        self.fingerprint = ""
        """part of the name of a file of token counts; empty where texts stay as they are"""
        if language:
            rules = f"{language}-{version('wetext')}-{english.VERSION}"
            self.fingerprint = f"-words-{rules}{added.fingerprint}"

    def __call__(self, text: str) -> str:
        if not (self.language and self.added.tokens):
            return self._read(text)
        pieces = self.added.pieces(text)
        return "".join(token or self._read(part) for part, token in pieces)


AS_WRITTEN = Normalizer("")


@cache
def _reader(language: str) -> Callable[[str], str]:
    """The function that reads a text: one for a process. Threads take turns. The grammars, which take a quarter of a
    second to load, are loaded for the first text that needs them."""
    if language not in LANGUAGES:
        raise InputError(
            f"[encoder] normalize = {language!r} is not known; give one of: {', '.join(LANGUAGES)}; or leave it empty"
        )
    require(
        find_spec("wetext") is not None,
        f"[encoder] normalize = {language!r} needs wetext: pip install 'titan-tts[speech]'",
    )
    lock, is_english = threading.Lock(), language == "en"

    def said(part: str) -> str:
        """A part in words. Where the grammar has no reading of it, its numbers alone are read."""
        from wetext.utils import normalize

        try:
            found = normalize(part, lang=language, operator="tn")
        except Exception:  # an assertion of its parser; no text may end a run
            if _NUMBER.fullmatch(part):
                return part
            return _NUMBER.sub(lambda number: said(number[0]), part)
        return english.mended(found) if is_english and "thousand" not in part else found

    @lru_cache(_KEPT)
    def read(text: str) -> str:
        parts = _CUTS.split(english.prepared(text) if is_english else text)
        with lock:
            words = [said(part) if TO_SAY.search(part) else part for part in parts]
        return "".join(words).replace(english.CUT, "")

    return read

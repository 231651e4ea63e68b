"""Word and character errors between a text and its transcript, both normalized alike.

Whisper's normalizer (transformers) with additions for speech synthesis; in both texts:

- Words in brackets count: the synthesis says them. (Whisper's takes them for remarks.)
- A number is compared digit by digit. Whisper's joins neighbours that are spelled out ("eight six"
  becomes 86) and leaves digits apart ("8 6"), so that one speech heard right counted as two errors,
  and six digits in a row as a single word.
- In English "a hundred" is 100, and signs between figures are words: 2+7, -5, 5 °, 50¢, &. (Whisper's drops them, or
  keeps them on one side alone.)
- Vowel signs of Hindi, Thai ... stay; Whisper's makes a blank of each. Those of Arabic and Hebrew,
  which are seldom written, go.
- Where words have no blanks between them (Chinese, Japanese, Thai ...) each character is a word.

Numbers that are spelled out become digits in English only.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

WITHOUT_BLANKS = frozenset("zh yue cmn wuu nan ja th lo my km bo".split())
# Thai, Lao, Tibetan and Burmese; Khmer; Japanese and Chinese.
_SCRIPTS_WITHOUT_BLANKS = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
_BRACKETS = re.compile(r"[()<>\[\]]")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?=\d)")
_SIGNS = (
    (re.compile(r"\ba (?=(hundred|thousand|million|billion)\b)", re.IGNORECASE), "one "),
    (re.compile(r"(?<=\d)\s*\+\s*(?=\d)"), " plus "),
    (re.compile(r"(?<![\w.,])[-\u2212](?=\d)"), "minus "),
    (re.compile("\u00b0"), " degrees "),
    (re.compile(r"(?<=\d)\s*\u00a2"), " cents"),
    (re.compile("&"), " and "),
)
"""The words that English speakers say for them"""

_ONE = re.compile(r"\bone(s?)\b")  # Whisper's writes a 1 that stands alone as a word


@dataclass(frozen=True)
class Errors:
    """Substitutions, insertions and deletions, and the size of the text: 0 where it has no word."""

    word_errors: int
    words: int
    character_errors: int
    characters: int
    compared: tuple[str, str] = field(default=("", ""), compare=False)
    """the text and what was heard, as they were compared"""


def language_code(language: str) -> str:
    """The code that Whisper has for a code, a code with a region ("en-US") or an English name."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    code = re.split("[-_]", language.strip().lower())[0]
    return TO_LANGUAGE_CODE.get(code, code)


def normalizer(
    language: str = "", spelling: Mapping[str, str] | None = None
) -> Callable[[str], str]:
    """The function that makes texts comparable: words in lower case with single blanks between.

    Args:
        language: code or English name; empty is taken for English.
        spelling: {British: American}, which Whisper's checkpoints bring; English only.
    """
    code = language_code(language)
    english = code in ("", "en")
    normalize = _whisper_normalizer(english, code in WITHOUT_BLANKS)

    def normalized(text: str) -> str:
        for sign, words in _SIGNS if english else ():
            text = sign.sub(words, text)
        text = normalize(_BRACKETS.sub(" ", text).replace(" %", "%"))
        if english:
            text = _ONE.sub(r"1\1", text)
        parts = [
            part for part in _BETWEEN_DIGITS.sub(" ", text).split() if any(map(str.isalnum, part))
        ]
        known = spelling if spelling and english else {}
        return " ".join(known.get(part, part) for part in parts)

    return normalized


@functools.cache
def _whisper_normalizer(english: bool, split_letters: bool) -> Callable[[str], str]:
    from transformers.models.whisper.english_normalizer import (
        BasicTextNormalizer,
        EnglishTextNormalizer,
    )

    if english:
        return EnglishTextNormalizer({})
    basic = BasicTextNormalizer(split_letters=split_letters)
    basic.clean = _without_symbols  # type: ignore[assignment]
    return basic


def _without_symbols(text: str) -> str:
    """Blanks for symbols and punctuation; no vowel points of Hebrew and Arabic, nor their tatweel."""
    kept = []
    for character in unicodedata.normalize("NFKC", text):
        category = unicodedata.category(character)
        if "\u0590" <= character < "\u0700" and category in ("Mn", "Lm"):
            continue
        kept.append(" " if category[0] in "SP" else character)
    return "".join(kept)


def guess_language(text: str) -> str:
    """ "zh" where most letters are of a script without blanks between words, else empty."""
    letters = sum(map(str.isalpha, text))
    return "zh" if 2 * len(_SCRIPTS_WITHOUT_BLANKS.findall(text)) > letters > 0 else ""


def count_errors(
    text: str, heard: str, language: str = "", spelling: Mapping[str, str] | None = None
) -> Errors:
    """Errors from a text to its transcript, by jiwer, both through `normalizer`.

    A text without a word (such as "...") has 0 words; all words heard in it are insertions.
    """
    import jiwer

    language = language or guess_language(text)
    normalize = normalizer(language, spelling)
    wanted, found = normalize(text), normalize(heard)
    words = len(wanted.split())
    # As the field does: with the blanks where a language has any.
    blank = "" if language_code(language) in WITHOUT_BLANKS else " "
    letters, letters_found = (each.replace(" ", blank) for each in (wanted, found))
    if not words:
        return Errors(len(found.split()), 0, len(letters_found), 0, (wanted, found))
    by_word = jiwer.process_words(wanted, found)
    by_character = jiwer.process_characters(letters, letters_found)
    return Errors(
        by_word.substitutions + by_word.insertions + by_word.deletions,
        words,
        by_character.substitutions + by_character.insertions + by_character.deletions,
        len(letters),
        (wanted, found),
    )

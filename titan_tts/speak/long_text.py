"""Splits texts that are too long for one utterance at natural pauses."""

import re
from collections.abc import Callable, Container, Sequence

from torchtitan.models.dit_tts.files import nfc

# Written without blanks between words.
_CJK = r"\u3000-\u30ff\u3400-\u9fff\uff00-\uffef"
_LINE = re.compile(rf"(?<=[{_CJK}])\s*\n\s*(?=[{_CJK}])")

# A dot behind these ends no sentence: titles, single letters ("z. B.", and "p. ex."), ordinals of up to three digits;
# and behind a short word before a number ("No. 5").
_ABBREVIATIONS = ("Dr", "Mr", "Ms", "St", "Mrs", "Prof", r"\w", r"\w\.\s\w\w", r"\d\d", r"\d\d\d")
_GOES_ON = "".join(rf"(?<!(?<![^\s\"'„“«(\[.–-]){each}\.)" for each in _ABBREVIATIONS)
_GOES_ON += r"(?!(?<=\b\w\w\.)\s+\d|(?<=\b\w\w\w\.)\s+\d)"

# Behind sentences, clauses, words but not abbreviations, words, and at last anywhere.
_BREAKS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?<=[.!?…।؟۔]){_GOES_ON}\s+|(?<=[.!?…][\"'”’)\]])\s+|(?<=[。！？])(?![。！？”」』）])"
        r"|(?<=[。！？][”」』）])|\n+",
        r"(?<=[,;:–—،])\s+|(?<=[、，；])",
        rf"{_GOES_ON}\s+",
        r"\s+",
        r"(?<=.)",
    )
)

_UNENDED = re.compile(rf"[^\W_{_CJK}][^\w.!?…,;:]*$")

FIRST_CHARACTERS = 16
"""minimum of the first piece at low latency, if the text has them"""


def clean_text(text: str) -> str:
    """Puts one blank between words, across line breaks; only an empty line, the end of a paragraph, becomes a
    line break. Its characters are composed (NFC), as in the data."""
    paragraphs = re.split(r"\n\s*\n", nfc(text))
    lines = (" ".join(_LINE.sub("", each).split()) for each in paragraphs)
    return "\n".join(each for each in lines if each)


def ended(text: str, characters: Container[str]) -> str:
    """A text with a full stop where none of its marks ends it, if the model has this among its `characters`: it has learned
    that speech fades behind one, and breaks off in the last sound of a text without."""
    return f"{text}." if "." in characters and _UNENDED.search(text) else text


def split_text(
    text: str, sizes: Callable[[Sequence[str]], list[float]], low_latency: bool = False
) -> list[str]:
    """Splits a text into pieces of size 1 at most, as few as possible. Sizes of neighbours are added.

    Args:
        sizes: returns the sizes of several texts; called once for each kind of break and round of joining.
        low_latency: the first piece has one sentence, or as many as make FIRST_CHARACTERS.

    >>> split_text("One. Two two. Three, four", lambda texts: [len(each) / 14 for each in texts])
    ['One. Two two.', 'Three, four']
    """
    sentences = _parts(text, 0)
    parts = list(zip(sentences, sizes(sentences), strict=True))
    first = 0
    if low_latency:
        while first < len(parts) and sum(len(p) for p, _ in parts[:first]) < FIRST_CHARACTERS:
            first += 1
    both = parts[:first], parts[first:]
    pieces = [each for part in both for each in _joined(_fitting(part, sizes), sizes)]
    return [" ".join(each.split()) for each in pieces if each.strip()] or [text]


def sentences(text: str) -> list[str]:
    """The sentences of a text, each with the blank behind it."""
    return _parts(text, 0)


def spaced_words(text: str) -> list[str]:
    """The words of a text as blanks divide it, with their punctuation; in scripts without blanks its clauses."""
    clauses = (clause for sentence in sentences(text) for clause in _parts(sentence, 1))
    return [word for clause in clauses for word in clause.split()]


def _parts(text: str, kind: int) -> list[str]:
    """Cuts the text behind every break of this kind."""
    ends = [match.end() for match in _BREAKS[kind].finditer(text) if match.end()]
    edges = sorted({0, *ends, len(text)})
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)] or [text]


def _fitting(
    parts: list[tuple[str, float]], sizes: Callable[[Sequence[str]], list[float]]
) -> list[tuple[str, float]]:
    """Splits the parts above 1 by the first kind of break that makes them fit."""
    for kind in range(1, len(_BREAKS)):
        split = [_parts(text, kind) if size > 1 else [text] for text, size in parts]
        new = [each for group in split if len(group) > 1 for each in group]
        if not new:
            continue
        of_new = iter(sizes(new))
        parts = [
            pair
            for group, old in zip(split, parts, strict=True)
            for pair in ([(each, next(of_new)) for each in group] if len(group) > 1 else [old])
        ]
    return parts


def _joined(
    parts: list[tuple[str, float]], sizes: Callable[[Sequence[str]], list[float]]
) -> list[str]:
    """Joins neighbours as far as they fit. What was joined is measured and joined on: it takes less than the sum of its
    parts, each of which counts a beginning and an end."""
    pieces: list[str] = []
    total = 0.0
    for text, size in parts:
        if pieces and total + size <= 1 + 1e-9:
            pieces[-1] += text
            total += size
        else:
            pieces.append(text)
            total = size
    if len(pieces) == len(parts):
        return pieces
    return _joined(list(zip(pieces, sizes(pieces), strict=True)), sizes)

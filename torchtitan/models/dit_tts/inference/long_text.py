"""Texts that are too long to be said at once, split where they may pause."""

import re
from collections.abc import Callable, Sequence

# Ends of sentences, then of clauses, then of words. A wrong one costs a short pause.
_BREAKS = (
    r"(?<=[.!?…])\s+|(?<=[.!?…][\"'”’)\]])\s+|(?<=[。！？])|\n+",
    r"(?<=[,;:–—])\s+|(?<=[、，；])",
    r"\s+",
)


def clean_text(text: str) -> str:
    """A text with one blank between words, however its lines are broken; only an empty line, the end of a
    paragraph, becomes a line break."""
    paragraphs = (" ".join(each.split()) for each in re.split(r"\n\s*\n", text))
    return "\n".join(each for each in paragraphs if each)


def split_text(text: str, fits: Callable[[str], bool], soon: bool = False) -> list[str]:
    """Pieces that fit, in order, as long as they may be. A word that fits nowhere is a piece of its own.

    Args:
        soon: the first one has one sentence at most, so that speech begins soon.

    >>> split_text("One. Two two. Three, four", lambda piece: len(piece) < 14)
    ['One. Two two.', 'Three, four']
    """
    sentences = _parts(text, _BREAKS[0])
    pieces = [piece for each in sentences for piece in _fitting(each, fits, _BREAKS[1:])]
    if soon:
        return [pieces[0], *_joined(pieces[1:], fits)]
    return _joined(pieces, fits)


def _parts(text: str, pattern: str) -> list[str]:
    return [part.strip() for part in re.split(pattern, text) if part.strip()] or [text]


def _fitting(text: str, fits: Callable[[str], bool], breaks: Sequence[str]) -> list[str]:
    """The text, or where it does not fit its parts by the first kind of breaks that makes them fit."""
    if fits(text) or not breaks:
        return [text]
    parts = _parts(text, breaks[0])
    return _joined([piece for each in parts for piece in _fitting(each, fits, breaks[1:])], fits)


def _joined(pieces: Sequence[str], fits: Callable[[str], bool]) -> list[str]:
    """Neighbours together, as far as they fit."""
    found: list[str] = []
    for piece in pieces:
        both = f"{found[-1]} {piece}" if found else ""
        if found and fits(both):
            found[-1] = both
        else:
            found.append(piece)
    return found

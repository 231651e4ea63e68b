"""Texts that are too long to be said at once, split where they may pause."""

import re
from collections.abc import Callable, Sequence

# Written without blanks between words.
_CJK = r"\u3000-\u30ff\u3400-\u9fff\uff00-\uffef"
_LINE = re.compile(rf"(?<=[{_CJK}])\s*\n\s*(?=[{_CJK}])")

# Behind sentences, clauses, words, and at last anywhere. Titles and initials end no sentence.
_TITLES = "".join(rf"(?<!\b{each}\.)" for each in ("Dr", "Mr", "Ms", "St", "Mrs", "Prof", "[A-Z]"))
_BREAKS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?<=[.!?…।؟۔]){_TITLES}\s+|(?<=[.!?…][\"'”’)\]])\s+|(?<=[。！？])(?![。！？”」』）])"
        r"|(?<=[。！？][”」』）])|\n+",
        r"(?<=[,;:–—،])\s+|(?<=[、，；])",
        r"\s+",
        r"(?<=.)",
    )
)

SOON_CHARACTERS = 16
"""at least, of a first piece that is to be there soon, if the text has them"""


def clean_text(text: str) -> str:
    """A text with one blank between words, however its lines are broken; only an empty line, the end of a
    paragraph, becomes a line break."""
    paragraphs = re.split(r"\n\s*\n", text)
    lines = (" ".join(_LINE.sub("", each).split()) for each in paragraphs)
    return "\n".join(each for each in lines if each)


def split_text(
    text: str, sizes: Callable[[Sequence[str]], list[float]], soon: bool = False
) -> list[str]:
    """Pieces of a size of at most 1, in order, as large as they may be. Sizes of neighbours are added.

    Args:
        sizes: of several texts; called once for each kind of break.
        soon: the first piece has one sentence, or as many as make SOON_CHARACTERS, so that speech begins
            soon.

    >>> split_text("One. Two two. Three, four", lambda texts: [len(each) / 14 for each in texts])
    ['One. Two two.', 'Three, four']
    """
    sentences = _parts(text, 0)
    parts = list(zip(sentences, sizes(sentences), strict=True))
    first = 0
    if soon:
        while first < len(parts) and sum(len(p) for p, _ in parts[:first]) < SOON_CHARACTERS:
            first += 1
    pieces = [
        each for part in (parts[:first], parts[first:]) for each in _joined(_fitting(part, sizes))
    ]
    return [" ".join(each.split()) for each in pieces if each.strip()] or [text]


def _parts(text: str, kind: int) -> list[str]:
    """The text in parts that end with a break, which together are the text."""
    ends = [match.end() for match in _BREAKS[kind].finditer(text) if match.end()]
    edges = sorted({0, *ends, len(text)})
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)] or [text]


def _fitting(
    parts: list[tuple[str, float]], sizes: Callable[[Sequence[str]], list[float]]
) -> list[tuple[str, float]]:
    """The parts, those above 1 split by the first kind of break that makes them fit."""
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


def _joined(parts: Sequence[tuple[str, float]]) -> list[str]:
    """Neighbours together, as far as they fit."""
    found: list[str] = []
    taken = 0.0
    for text, size in parts:
        if found and taken + size <= 1 + 1e-9:
            found[-1] += text
            taken += size
        else:
            found.append(text)
            taken = size
    return found

"""Do texts belong to their recordings? Judged by lengths alone: longer texts are longer speech.

Training and the doctor share `judge_texts`. Its limits follow from what right texts of the same spread explain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MATCH, NOT_COMPARED = "", "texts_not_compared"
LITTLE_EXPLAINED, OF_OTHERS = "texts_explain_little", "texts_of_others"
"""verdicts, with the doctor's codes, the worst last"""

# The least correlation to expect of right texts: nothing can be told from less, nor from single words.
_MIN_EXPECTED = 0.3
_MIN_CHARS = 12
# Standard deviations of chance between no correlation and the expected one.
_MIN_SIGMAS = 6
# Characters that a digit is said in, beyond itself: "1998" takes as long as some 24 letters.
_DIGIT_CHARS = 5


@dataclass(frozen=True)
class Match:
    """Rank correlation between the lengths of the texts of one language and those of their recordings.

    Attributes:
        explained: fraction of the variance of the recordings' ranks by length that those of the texts explain.
        expected: the least fraction that right texts explain whose lengths are spread like these.
    """

    language: str
    count: int
    explained: float
    expected: float

    @property
    def verdict(self) -> str:
        # Enough texts, of lengths that differ enough.
        chance = np.tanh(_MIN_SIGMAS / np.sqrt(max(1, self.count - 3)))
        if self.expected < max(chance, _MIN_EXPECTED) ** 2:
            return NOT_COMPARED
        # Right texts with seconds of silence or of several speakers explain less than the others, but half of it.
        if self.explained < self.expected / 2:
            return OF_OTHERS
        return LITTLE_EXPLAINED if self.explained < self.expected else MATCH

    @property
    def where(self) -> str:
        return f"language {self.language!r}" if self.language else "all texts"

    def __str__(self) -> str:
        if self.verdict == NOT_COMPARED:
            return f"{self.count} texts are too few, too short or too alike in length"
        return (
            f"texts explain {self.explained:.0%} of the variance of the lengths, where right texts of this spread explain "
            f"{self.expected:.0%} and more"
        )


def judge_texts(metadata: Sequence[dict[str, Any]], frames: np.ndarray) -> list[Match]:
    """A judgement of each language, of JSON and frames (n,) of samples."""
    groups: dict[str, list[int]] = {}
    for number, each in enumerate(metadata):
        groups.setdefault(str(each.get("language") or ""), []).append(number)
    return [
        _judge(name, [metadata[n]["text"] for n in group], frames[group].astype(np.float64))
        for name, group in sorted(groups.items())
    ]


def _judge(language: str, texts: list[str], frames: np.ndarray) -> Match:
    spoken = np.array([len(text) + _DIGIT_CHARS * sum(map(str.isdecimal, text)) for text in texts])
    expected = _expected_correlation(spoken, frames)
    # By ranks, so that a few texts of other lengths, as a book's for one sentence, count no more than others.
    ranks = np.stack([_ranks(spoken), _ranks(frames)])
    found = float(np.corrcoef(ranks)[0, 1]) if ranks.std(1).all() else 0.0
    return Match(language, len(texts), max(0.0, found) ** 2, expected**2)


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value; equal ones have their mean."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[index]


def _expected_correlation(characters: np.ndarray, frames: np.ndarray) -> float:
    """The correlation, 0 to 0.8, that the spreads of text lengths (k,) and frames (k,) let expect of right texts: a
    character's time differs by half of the mean; the rest of the frames' spread is the speakers'."""
    if not len(frames) or characters.mean() < _MIN_CHARS or not characters.std():
        return 0.0
    told = (characters.std() / characters.mean()) ** 2 - 0.25 / characters.mean()
    spread = float(frames.std() / frames.mean())
    return 0.8 * min(1.0, np.sqrt(max(0.0, told)) / spread) if spread else 0.0

"""Do texts belong to their recordings? Judged by lengths alone: longer texts are longer speech.

Training and the doctor share `judge_texts`. Its limits follow from what right texts of the same spread explain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.text.durations import Counter, fits, solve

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
# Rows by which a list is tried against itself, and the standard deviations of chance by which the texts of other rows
# must fit more recordings. Of right lists it is -3 or less (spoken digits, prompts, sentences), of shifted ones 9.
_MAX_SHIFT = 5
_SHIFT_SIGMAS = 5.0


@dataclass(frozen=True)
class Match:
    """The fit of the texts of one language to the lengths of their recordings.

    Attributes:
        explained: fraction of the variance of the lengths, less what as many letters explain of any lengths.
        expected: the least fraction that right texts explain whose lengths are spread like these.
        told: true where there are enough texts, of lengths that differ enough.
        shift: rows between a recording and the text that fits it better than its own; 0: its own does.
    """

    language: str
    count: int
    explained: float
    expected: float
    told: bool
    shift: int

    @property
    def verdict(self) -> str:
        if self.shift:
            return OF_OTHERS
        if not self.told:
            return NOT_COMPARED
        # Right texts with seconds of silence or of several speakers explain less than the others, but half of it.
        if self.explained < self.expected / 2:
            return OF_OTHERS
        return LITTLE_EXPLAINED if self.explained < self.expected else MATCH

    @property
    def where(self) -> str:
        return f"language {self.language!r}" if self.language else "all texts"

    def __str__(self) -> str:
        if self.shift:
            side = "before" if self.shift > 0 else "after"
            rows = "one row" if abs(self.shift) == 1 else f"{abs(self.shift)} rows"
            return f"the texts {rows} {side} fit the lengths far better"
        if not self.told:
            return f"{self.count} texts are too few, too short or too alike in length"
        return (
            f"texts explain {max(0.0, self.explained):.0%} of the variance of the lengths, where right texts of this "
            f"spread explain {self.expected:.0%} and more"
        )


def judge_texts(metadata: Sequence[dict[str, Any]], frames: np.ndarray) -> list[Match]:
    """A judgement of each language, of JSON and frames (n,) of samples in the order of their list."""
    groups: dict[str, list[int]] = {}
    for number, each in enumerate(metadata):
        groups.setdefault(str(each.get("language") or ""), []).append(number)
    return [
        _judge(name, [metadata[n]["text"] for n in group], frames[group].astype(np.float64))
        for name, group in sorted(groups.items())
    ]


def _judge(language: str, texts: list[str], frames: np.ndarray) -> Match:
    features = np.stack(list(map(Counter("", ()), texts)))
    good = fits(features, frames)
    frames, features = frames[good], features[good][:, features[good].any(0)]
    texts = [text for text, each in zip(texts, good, strict=True) if each]
    count, symbols = features.shape
    # Column k: each text beside the recording that many rows on.
    shifts = [0, *(k for n in range(1, _MAX_SHIFT + 1) for k in (n, -n))]
    rolled = np.stack([np.roll(frames, -k) for k in shifts], 1)
    missed = np.abs(rolled - features @ solve(features, rolled))
    spoken = np.array([len(text) + _DIGIT_CHARS * sum(map(str.isdecimal, text)) for text in texts])
    expected = _expected_correlation(spoken, frames)
    needed = max(np.tanh(_MIN_SIGMAS / np.sqrt(max(1, count - 3))), _MIN_EXPECTED)
    spread = float(((frames - frames.mean()) ** 2).sum())
    left = float((missed[:, 0] ** 2).sum()) / max(1, count - symbols)
    explained = 1.0 - left * (count - 1) / spread if spread else 0.0
    told = bool(expected >= needed and 2 * count > 3 * symbols)
    return Match(language, count, explained, expected**2, told, _shift(texts, missed, shifts))


def _shift(texts: list[str], missed: np.ndarray, shifts: list[int]) -> int:
    """The shift by which far more recordings have a text that fits them better; 0: there is none."""
    known: dict[str, int] = {}
    text = np.array([known.setdefault(each, len(known)) for each in texts])
    sigmas = []
    for column, k in enumerate(shifts):
        other = text != np.roll(text, k)  # neighbours with one text tell nothing
        better = np.sign(missed[:, 0] - np.roll(missed[:, column], k))[other]
        sigmas.append(better.sum() / np.sqrt(max(1, len(better))))
    best = int(np.argmax(sigmas))
    return shifts[best] if sigmas[best] > _SHIFT_SIGMAS else 0


def _expected_correlation(characters: np.ndarray, frames: np.ndarray) -> float:
    """The correlation, 0 to 0.8, that the spreads of text lengths (k,) and frames (k,) let expect of right texts: a
    character's time differs by half of the mean; the rest of the frames' spread is the speakers'."""
    if not len(frames) or characters.mean() < _MIN_CHARS or not characters.std():
        return 0.0
    told = (characters.std() / characters.mean()) ** 2 - 0.25 / characters.mean()
    spread = float(frames.std() / frames.mean())
    return 0.8 * min(1.0, np.sqrt(max(0.0, told)) / spread) if spread else 0.0

"""Words and their times as JSON, SubRip (.srt) and WebVTT (.vtt)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from titan_tts.speak.long_text import sentences

_LINE = 42
"""characters of a cue at most, as subtitles for people have them"""

_PAUSE = 0.5
"""seconds: a cue stays up to the next one over a shorter pause, and none goes on over a longer"""

_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


@dataclass(frozen=True)
class Word:
    """A word of a text, with its punctuation, and when it is said."""

    text: str
    begin: float
    """seconds from the start of the sound"""

    end: float


def as_json(words: Sequence[Word]) -> list[dict[str, Any]]:
    """The words in the form of OpenAI's transcripts."""
    return [
        {"word": word.text, "start": round(word.begin, 3), "end": round(word.end, 3)}
        for word in words
    ]


def subtitles(words: Sequence[Word], kind: str) -> str:
    """The content of an srt or vtt file. In the latter each word of a cue has its time, too."""
    found, is_vtt = cues(words), kind == "vtt"
    nexts = [cue[0].begin for cue in found[1:]] + [float("inf")]
    parts = ["WEBVTT\n"] if is_vtt else []
    for number, (cue, following) in enumerate(zip(found, nexts), 1):
        end = following if following - cue[-1].end < _PAUSE else cue[-1].end
        times = f"{_clock(cue[0].begin, is_vtt)} --> {_clock(end, is_vtt)}"
        text = _timed(cue) if is_vtt else " ".join(word.text for word in cue)
        parts.append(f"{times}\n{text}\n" if is_vtt else f"{number}\n{times}\n{text}\n")
    return "\n".join(parts)


def cues(words: Sequence[Word]) -> list[list[Word]]:
    """The words in groups of like length within a sentence; no group spans two sentences or a pause."""
    found: list[list[Word]] = []
    for sentence in _sentences(words):
        width, lines = _LINE, _lines(sentence, _LINE)
        while width and len(narrower := _lines(sentence, width - 1)) == len(lines):
            width, lines = width - 1, narrower
        found += lines
    return found


def _sentences(words: Sequence[Word]) -> list[list[Word]]:
    """The words in groups that a pause or a sentence's end divides."""
    ends = set(accumulate(len(each) for each in sentences(" ".join(word.text for word in words))))
    found, place = [[word] for word in words[:1]], 0
    for before, word in pairwise(words):
        place += len(before.text) + 1
        if place in ends or word.begin - before.end >= _PAUSE:
            found.append([])
        found[-1].append(word)
    return found


def _lines(words: Sequence[Word], width: int) -> list[list[Word]]:
    """Lines of so many characters, or of one word each."""
    lines: list[list[Word]] = []
    length = width + 1
    for word in words:
        length += 1 + len(word.text)
        if length > width:
            lines.append([])
            length = len(word.text)
        lines[-1].append(word)
    return lines


def _timed(cue: Sequence[Word]) -> str:
    """The text of a WebVTT cue, in which times ascend strictly."""
    text, last = cue[0].text.translate(_ESCAPED), _clock(cue[0].begin, True)
    for word in cue[1:]:
        begin = _clock(word.begin, True)
        mark = f"<{begin}>" if begin > last else ""
        text, last = f"{text} {mark}{word.text.translate(_ESCAPED)}", max(begin, last)
    return text


def _clock(seconds: float, is_vtt: bool) -> str:
    minutes, milliseconds = divmod(round(1000 * seconds), 60_000)
    clock = f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds / 1000:06.3f}"
    return clock if is_vtt else clock.replace(".", ",")

"""Times of a text's words in its speech, by the forced alignment of `text/aligner.py`.

A model of [model] text_positions = "aligned" has an aligner of its own characters or phones and latents. For any other
model the base voice's is used, by phones, over the sound as its codec encodes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_tts.speak.load_run import LoadedRun
from titan_tts.speak.long_text import sentences, spaced_words
from titan_tts.speak.utterance import Speech, pause
from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.config.manager import load_run_config
from torchtitan.models.dit_tts.config.shipped import BASE, shipped_path
from torchtitan.models.dit_tts.speech.audio import resample
from torchtitan.models.dit_tts.speech.codec import Codec, build_codec
from torchtitan.models.dit_tts.text.aligner import Aligner
from torchtitan.models.dit_tts.text.build_tokenizer import load_tokenizer

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


_LONGEST_GAP = 0.1
"""seconds between two words that both share; more is a pause"""


@dataclass(frozen=True)
class WordAligner:
    """Finds the words of a text in its speech."""

    aligner: Aligner
    spoken: Callable[[str], str]
    """from a text to the characters, or phones, that the aligner places"""

    added: AddedTokens
    """of texts; they are no words"""

    codec: Codec | None = None
    """whose latents the aligner knows; None: those of the speech"""

    def times(self, texts: Sequence[str], spoken: Sequence[Speech]) -> list[Word]:
        """The words of a text that was said in pieces. `texts`, `spoken`: of each piece; they are joined by pauses."""
        found, begin = list[Word](), 0.0
        for text, speech in zip(texts, spoken, strict=True):
            for word in self._of_piece(text, speech):
                found.append(replace(word, begin=begin + word.begin, end=begin + word.end))
            rate = speech.sample_rate
            begin += (len(speech.waveform) + len(pause(rate))) / rate
        return found

    def _of_piece(self, text: str, speech: Speech) -> list[Word]:
        parts = (part for part, token in self.added.pieces(text) if not token)
        texts = [word for part in parts for word in spaced_words(part)]
        whole = self.spoken(text)
        latents, seconds = speech.latents.numpy(), len(speech.waveform) / speech.sample_rate
        if self.codec is not None:
            samples = speech.waveform.numpy(), speech.sample_rate, self.codec.sample_rate
            latents = self.codec.encode(torch.from_numpy(resample(*samples))).cpu().numpy()
        ends = self.aligner.frames(whole, latents).cumsum() * (seconds / len(latents))
        words: list[Word] = []
        before = ""
        for text, (first, last) in zip(texts, _places(texts, whole, self.spoken), strict=True):
            if first < last:
                words.append(Word(before + text, float(ends[first]), float(ends[last])))
                before = ""
            elif words:  # a dash, which belongs to the word before it
                words[-1] = replace(words[-1], text=f"{words[-1].text} {text}")
            else:
                before += f"{text} "
        return _without_gaps(words)


def _places(
    words: Sequence[str], whole: str, spoken: Callable[[str], str]
) -> list[tuple[int, int]]:
    """(first, last + 1) of each word's sounds among the characters `whole` of the text. A word alone may be read
    otherwise than in its text ("the", "km"), so the most alike parts of both readings are matched."""
    alone = [spoken(word) for word in words]
    apart = " ".join(alone)
    place_of = np.zeros(len(apart) + 1)
    matcher = SequenceMatcher(None, apart, whole, autojunk=False)
    for _, first, last, to, until in matcher.get_opcodes():
        place_of[first : last + 1] = np.linspace(to, until, last - first + 1)
    found, begin = [], 0
    for sounds in alone:
        first, last = place_of[[begin, begin + len(sounds)]].round().astype(int).tolist()
        while first < last and not whole[first].isalnum():
            first += 1
        while first < last and not whole[last - 1].isalnum():
            last -= 1
        found.append((first, last))
        begin += len(sounds) + 1
    return found


def _without_gaps(words: list[Word]) -> list[Word]:
    """The words without the gaps between them that are no pauses."""
    begins, ends = [word.begin for word in words[:1]], []
    for word, following in pairwise(words):
        is_pause = following.begin - word.end >= _LONGEST_GAP
        middle = (word.end + following.begin) / 2
        ends.append(word.end if is_pause else middle)
        begins.append(following.begin if is_pause else middle)
    ends += [word.end for word in words[-1:]]
    return [replace(w, begin=b, end=e) for w, b, e in zip(words, begins, ends, strict=True)]


def word_aligner(run: LoadedRun) -> WordAligner:
    """The aligner for a model's speech."""
    own, added = run.tokenizer, run.tokenizer.added
    if own.aligner is not None:
        return WordAligner(own.aligner, own.spoken, added)
    folder = Path(shipped_path(BASE))
    config = load_run_config(folder)
    base = load_tokenizer(folder, config)
    assert base.aligner is not None
    tokenizer = own if own.vocabulary.language else base  # phones are of the model's language
    return WordAligner(
        base.aligner,
        lambda text: tokenizer.spoken(added.without(text)),
        added,
        build_codec(config.sampling.codec),
    )

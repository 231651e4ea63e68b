"""Two transcripts of each segment, by two recognizers, and how far they agree."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from titan_tts.collect.settings import Settings
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.speech.scoring.interface import Recognizer, Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer
from torchtitan.models.dit_tts.speech.scoring.word_errors import (
    count_errors,
    guess_language,
    normalizer,
)

_BATCH = 16  # segments that a recognizer hears at once, if it can
_MAX_COMPRESSION = 2.4  # as Whisper's own decoding has it


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """Transcripts of a segment by one recognizer or two, whose agreement is measured."""

    text: str
    text_verbatim: str | None
    agreement: float | None  # of the two texts, 0 to 1; None where there is one recognizer
    language: str  # as the recognizer tells it, else the setting
    confidence: float | None = None  # mean probability of its tokens; None: it is not told


class Transcriber:
    """Two recognizers, or one where the settings have no second."""

    def __init__(self, settings: Settings, device: str) -> None:
        verbatim = settings.verbatim_recognizer
        self.clean = open_recognizer(settings.recognizer, device)
        self.verbatim = open_recognizer(verbatim, device) if verbatim else None
        self.language = settings.language
        for recognizer in filter(None, (self.clean, self.verbatim)):
            recognizer.check_texts([], [self.language] if self.language else [])

    def transcribe(self, sounds: Sequence[Sound]) -> list[Transcript]:
        """A transcript for each sound."""
        found = []
        for start in range(0, len(sounds), _BATCH):
            some = sounds[start : start + _BATCH]
            clean = self._hear(self.clean, some)
            verbatim = self._hear(self.verbatim, some) if self.verbatim else [(None,)] * len(some)
            for (text, detected, *told), (other, *_) in zip(clean, verbatim, strict=True):
                language = detected or self.language
                found.append(
                    Transcript(
                        text=text,
                        text_verbatim=other,
                        agreement=None if other is None else agreement(text, other, language),
                        language=language,
                        confidence=0.0 if _repeats(text) else next(iter(told), None),
                    )
                )
        return found

    def _hear(self, recognizer: Recognizer, sounds: Sequence[Sound]) -> list[tuple]:
        """[(text, language or "" where the recognizer does not tell it, and maybe its confidence)]"""
        if in_batches := getattr(recognizer, "transcribe_batch", None):
            heard = in_batches(list(sounds), self.language)
        else:
            heard = [(recognizer.transcribe(each, self.language), "") for each in sounds]
        require(
            len(heard) == len(sounds),
            f"the recognizer '{recognizer.name}' returned {len(heard)} texts for {len(sounds)} segments, so that it "
            "is not known whose they are; its transcribe_batch must return one for each",
        )
        return [(text.strip(), *told) for text, *told in heard]


def _repeats(text: str) -> bool:
    """True if a text says the same again and again, as recognizers do of what they cannot hear."""
    data = text.encode()
    return len(data) > _MAX_COMPRESSION * len(zlib.compress(data))


def agreement(text: str, other: str, language: str = "") -> float:
    """1 - word errors between two transcripts, as a fraction of the longer one's words: from 0, nothing in common, to 1,
    the same words. Two empty ones agree on nothing, so 0. Both go through the project's normalizer."""
    language = language or guess_language(text)
    normalize = normalizer(language)
    longer, shorter = sorted((text, other), key=lambda each: -len(normalize(each).split()))
    errors = count_errors(longer, shorter, language)
    return 1.0 - errors.word_errors / errors.words if errors.words else 0.0

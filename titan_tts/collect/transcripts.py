"""Two transcripts of each segment, by two recognizers, and how far they agree."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from titan_tts.collect.settings import Settings
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer
from torchtitan.models.dit_tts.speech.scoring.scores import hear
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
            clean = hear(self.clean, some, self.language)
            verbatim = [(None,)] * len(some)
            if self.verbatim:
                verbatim = hear(self.verbatim, some, self.language)
            for (text, detected, *told), (other, *_) in zip(clean, verbatim, strict=True):
                text, other = text.strip(), other and other.strip()
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

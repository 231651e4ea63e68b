"""Scores of one utterance, and of many together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.models.dit_tts.added_tokens import NO_TOKENS, AddedTokens
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.speech.scoring.interface import (
    OpinionPredictor,
    Recognizer,
    Sound,
    SpeakerEncoder,
)
from torchtitan.models.dit_tts.speech.scoring.pitch import PitchTracker
from torchtitan.models.dit_tts.speech.scoring.word_errors import Errors, count_errors


@dataclass(frozen=True)
class Scorers:
    """The opened scorers; see `plugins`."""

    recognizer: Recognizer | None = None
    speaker: SpeakerEncoder | None = None
    opinion: OpinionPredictor | None = None
    added: AddedTokens = NO_TOKENS
    """of the run, which no one should hear as words"""

    pitch: PitchTracker | None = None


@dataclass(frozen=True)
class UtteranceScore:
    """None where there was no scorer, it gave no finite number or, for the speaker, no reference."""

    heard: str | None
    errors: Errors | None
    speaker_similarity: float | None
    opinion: float | None
    seconds: float
    """length of the sound"""

    pitch: float | None = None
    """median of the fundamental frequency in Hz"""

    pitch_range: float | None = None
    """in semitones, see `PitchTracker`"""


def hear(recognizer: Recognizer, sounds: Sequence[Sound], language: str = "") -> list[tuple]:
    """[(words, language or "" where the recognizer does not tell it, and maybe its confidence)] of each sound, all at
    once if the recognizer can. Raises InputError: it returned another number of texts, or no pairs."""
    if in_batches := getattr(recognizer, "transcribe_batch", None):
        heard = list(in_batches(list(sounds), language))
    else:
        heard = [(recognizer.transcribe(each, language), "") for each in sounds]
    require(
        len(heard) == len(sounds),
        f"the recognizer '{recognizer.name}' returned {len(heard)} texts for {len(sounds)} sounds, so that it "
        "is not known whose they are; its transcribe_batch must return one for each",
    )
    for each in heard:  # of a text alone the first letter would be taken
        require(
            isinstance(each, tuple | list) and isinstance(each[0], str),
            f"the recognizer '{recognizer.name}' returned {each!r:.40}, but its transcribe_batch must return (words, "
            "language) for each sound",
        )
    return heard


def score(
    sound: Sound,
    text: str,
    scorers: Scorers,
    reference: Sound | None = None,
    language: str = "",
    heard: str | None = None,
) -> UtteranceScore:
    """Scores of a sound that should say a text in the voice of a reference, in a language, if known. `heard`: what the
    recognizer heard in it, if that is known."""
    errors = similarity = opinion = None
    if scorers.recognizer is not None:
        if heard is None:
            heard = scorers.recognizer.transcribe(sound, language)
        spelling = getattr(scorers.recognizer, "spelling", None)
        errors = count_errors(scorers.added.without(text), heard, language, spelling)
    if scorers.speaker is not None and reference is not None:
        similarity = _finite(_cosine(*scorers.speaker.embed([sound, reference])))
    if scorers.opinion is not None:
        opinion = _finite(scorers.opinion.score(sound))
    pitch = scorers.pitch.measure(sound) if scorers.pitch is not None else (None, None)
    return UtteranceScore(heard, errors, similarity, opinion, sound.seconds, *pitch)


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    """The cosine of two vectors; 0 if one is all zeros, as for a sound in which an encoder hears nothing."""
    lengths = np.linalg.norm(first) * np.linalg.norm(second)
    return float(np.clip(first @ second / max(lengths, 1e-9), -1.0, 1.0))


def _finite(value: float) -> float | None:
    """A score; None for the NaN of a sound that a scorer cannot judge."""
    return value if math.isfinite(value) else None


def corpus_scores(scores: Sequence[UtteranceScore]) -> dict[str, float | None]:
    """ "wer" and "cer" (errors per word and per character of all texts together), means of
    "speaker_similarity" and "opinion"; None where no utterance has a value."""
    errors = [score.errors for score in scores if score.errors is not None]
    similarities = [s.speaker_similarity for s in scores if s.speaker_similarity is not None]
    opinions = [score.opinion for score in scores if score.opinion is not None]
    return {
        "wer": _ratio([e.word_errors for e in errors], sum(e.words for e in errors)),
        "cer": _ratio([e.character_errors for e in errors], sum(e.characters for e in errors)),
        "speaker_similarity": _ratio(similarities, len(similarities)),
        "opinion": _ratio(opinions, len(opinions)),
    }


def _ratio(values: Sequence[float], count: int) -> float | None:
    return sum(values) / count if count else None

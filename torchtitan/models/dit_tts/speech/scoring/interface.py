"""The protocols of recognizers, speaker encoders and predictors of opinion; see `plugins`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan.models.dit_tts.speech.audio import resample


@dataclass(frozen=True)
class Sound:
    """A waveform (samples,) float in [-1, 1] and its rate in Hz."""

    waveform: Tensor
    sample_rate: int

    @property
    def seconds(self) -> float:
        return len(self.waveform) / self.sample_rate

    def samples(self, rate: int) -> np.ndarray:
        """(n,) float32 in [-1, 1] at `rate` Hz. NaN and infinity, of a model gone wrong, are silence."""
        samples = torch.nan_to_num(self.waveform.detach().float(), posinf=0.0, neginf=0.0)
        return resample(samples.cpu().numpy(), self.sample_rate, rate).clip(-1.0, 1.0)


class Recognizer(Protocol):
    """Transcribes speech. One that hears several sounds at once, or tells their language, also has a
    method transcribe_batch(sounds, language) -> [(words, language), ...], one pair per sound in their order. A third value
    may follow: the mean probability of the words' tokens, by which texts of what it cannot hear are told.

    Attributes:
        name: for tables and reports, such as "Whisper large-v3".
    """

    name: str

    def check_texts(self, texts: Sequence[str], languages: Sequence[str] = ()) -> None:
        """Raises InputError where it cannot know a word of these texts, whatever is said, or one of the
        languages that they are in."""
        ...

    def transcribe(self, sound: Sound, language: str = "") -> str:
        """The words heard; language: ISO 639-1 code, empty where it is not known."""
        ...


class SpeakerEncoder(Protocol):
    """Says who speaks, as a vector."""

    name: str

    def embed(self, sounds: Sequence[Sound]) -> np.ndarray:
        """(n, E) float32 of n sounds; the cosine of two says how alike the voices are."""
        ...


class OpinionPredictor(Protocol):
    """Predicts the mean opinion score that listeners would give."""

    name: str

    def score(self, sound: Sound) -> float:
        """Return the predicted opinion of a sound, from 1 (bad) to 5 (excellent)."""
        ...

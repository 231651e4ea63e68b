"""Utterances, their voices, and the speech that a model makes of them: pieces are joined without clicks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.files import nfc
from torchtitan.models.dit_tts.speech.sampling.sound_files import SUFFIXES, write_sound
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer
from torchtitan.models.dit_tts.text.vocabulary import named

PAUSE_SECONDS = 0.12
"""between two pieces"""

FADE_SECONDS = 0.005
"""at both ends of a piece; shorter than any sound of speech"""

SHOWN = 20
"""known values that a message names"""


@dataclass(frozen=True)
class Voice:
    """The voice to speak in."""

    reference: Tensor | None = None
    """(R, C) latents; None: no particular speaker"""

    speaker: str = ""
    """name in the training data: selects the rate of speech, and the token where the model has one"""

    text: str = ""
    """text of the reference; empty: not known"""

    adapter: str = ""
    """name among the synthesizer's adapters; empty: the model as it is"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", nfc(self.text))

    def latents(self, data: Data) -> Tensor:
        """The reference as a model takes it: at most max_speaker_frames; (0, C) without one."""
        if self.reference is None:
            return torch.zeros(0, data.latent_channels)
        return self.reference[: data.max_speaker_frames]


@dataclass(frozen=True)
class Utterance:
    """One text to say. It and the text of its voice are composed (NFC), as in data that `prepare` makes."""

    text: str
    voice: Voice = Voice()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """values of the conditioning tokens except duration, and the caption, named as in a sample's JSON"""

    frames: int | None = None
    """length in latent frames; None: estimated"""

    speed: float = 1.0
    """divides the estimated length"""

    until: int = 0
    """so many of `frames` are said, from the first on; 0: all"""

    known: Tensor | None = None
    """(K, C) latents of the first frames, said before"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", nfc(self.text))


@dataclass(frozen=True)
class Speech(Sound):
    """The speech of one utterance: a waveform (samples,) float32 in [-1, 1] on the CPU, with its latents (T, C)."""

    latents: Tensor

    def save(self, path: str | Path) -> None:
        """Writes the sound to a file .wav, .flac, .ogg or .mp3."""
        suffix = Path(path).suffix
        is_sound = suffix.lower() in SUFFIXES
        require(is_sound, f"{path}: a sound's name ends with one of {', '.join(SUFFIXES)}")
        write_sound(path, self.waveform, self.sample_rate)


def pause(sample_rate: int) -> Tensor:
    """(samples,) of silence."""
    return torch.zeros(int(PAUSE_SECONDS * sample_rate))


def part(waveform: Tensor, index: int, count: int, sample_rate: int) -> Tensor:
    """(samples,) that one of `count` pieces gives to the joined sound: faded in and out, behind a pause unless it is the
    first. A single piece stays as it is."""
    if count == 1:
        return waveform
    length = min(int(FADE_SECONDS * sample_rate), len(waveform) // 2)
    ramp = torch.linspace(0, 1, length + 1)[:-1]
    faded = waveform.clone()
    faded[:length] *= ramp
    faded[len(faded) - length :] *= ramp.flip(0)
    return torch.cat([pause(sample_rate), faded]) if index else faded


def join(spoken: Sequence[Speech]) -> Speech:
    """The speech of pieces with pauses between them."""
    rate, count = spoken[0].sample_rate, len(spoken)
    parts = [part(each.waveform, index, count, rate) for index, each in enumerate(spoken)]
    return Speech(torch.cat(parts), rate, torch.cat([each.latents for each in spoken]))


def check_text(text: str, tokenizer: ConditionedTokenizer, name: str = "--text") -> None:
    """Raises InputError for characters that the run was not trained with. `name` tells whose text it is."""
    unknown = tokenizer.unknown_characters(text.replace("\n", ""))
    model, known = tokenizer.vocabulary.model, tokenizer.vocabulary.characters
    knows = f"{model} knows {known!r}" if known else f"{model} has no ids for them"
    shown = named(unknown, SHOWN)
    if tokenizer.vocabulary.language and unknown:  # phones are not in the text
        words = (word for word in text.split() if tokenizer.unknown_characters(word))
        shown += f" in {named(list(dict.fromkeys(words)), SHOWN)}"
    require(
        not unknown, f"{name} has characters that the run was not trained with ({shown}); {knows}"
    )

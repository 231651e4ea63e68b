"""Utterances, their voices, and the speech that a model makes of them."""

from collections.abc import Mapping
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

"""Texts and voices to waveforms: the one way in which `generate`, `evaluate`, `serve`, `demo` and Python speak."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from titan_tts.speak.joining import pause
from titan_tts.speak.lengths import Lengths, TimedText
from titan_tts.speak.load_run import LoadedRun
from titan_tts.speak.long_text import split_text
from titan_tts.speak.speaker_reference import (
    encode_reference,
    load_latents,
    reference_settings,
)
from titan_tts.speak.speech_data import SpeechData
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.codec import Codec
from torchtitan.models.dit_tts.speech.sampling.sampler import SpeechRequest, generate_latents
from torchtitan.models.dit_tts.text.tokenizer import with_duration

_MAX_SECONDS = 600.0
"""of a reference whose text is known"""


@dataclass(frozen=True)
class Voice:
    """Whose voice is to be heard."""

    reference: Tensor | None = None
    """(R, C) latents; None: nobody's in particular"""

    speaker: str = ""
    """whose rate of speech is taken, and whose token, where the model has one"""

    text: str = ""
    """what the reference says; empty: not known"""


@dataclass(frozen=True)
class Utterance:
    """One text to say."""

    text: str
    voice: Voice = Voice()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """values of the conditioning tokens but duration, as a sample's JSON names them"""

    seconds: float | None = None
    """length; None: estimated"""

    speed: float = 1.0
    """divides the estimated length"""

    take: int = 0
    """another number is another way to say it"""


@dataclass(frozen=True)
class Speech:
    """What was said."""

    waveform: Tensor
    """(samples,) float32 in [-1, 1] on the CPU"""

    sample_rate: int
    latents: Tensor
    """(T, C)"""


@dataclass
class Synthesizer:
    """A model with all that it speaks with. Use one from one thread at a time."""

    run: LoadedRun
    codec: Codec
    speech_data: SpeechData
    sampling: Sampling
    find_lengths: Callable[[], Lengths]
    """called once a length is to be estimated"""

    data_path: str | list[str] = ""
    """whose prepare.json tells how references are treated: the training data, or an exported folder"""

    @cached_property
    def lengths(self) -> Lengths:
        """How long texts take."""
        return self.find_lengths()

    @property
    def sample_rate(self) -> int:
        """Of the waveforms, in Hz."""
        return self.codec.sample_rate

    @property
    def speakers(self) -> list[str]:
        """Names that `voice` knows."""
        return self.speech_data.speakers

    def speaker(self, name: str) -> Voice:
        """One of `speakers`. Raises InputError for another."""
        return Voice(self.speech_data.reference(name), name)

    def recording(
        self,
        path: str | Path,
        loudness: float | Literal["off"] | None = None,
        text: str = "",
    ) -> Voice:
        """The voice in an audio file, or in a .npy of latents (R, C).

        Args:
            loudness: in LUFS that it is brought to; None: as the training data's references.
            text: what it says, if that is known.

        Raises:
            InputError: no readable audio, or too little of it.
        """
        if Path(path).suffix == ".npy":
            return Voice(load_latents(path, self.run.config.data.latent_channels), text=text)
        settings = reference_settings(self.data_path, loudness)
        # Its text is of all of it; the model takes less.
        longest = round(_MAX_SECONDS * self.codec.frames_per_second)
        limit = longest if text else self.run.config.data.max_speaker_frames
        return Voice(encode_reference(path, self.codec, settings, limit), text=text)

    def voice(self, of: "str | Path | Tensor | Voice | None") -> Voice:
        """A voice of an audio file, of a speaker's name, of latents (R, C), or nobody's (None).

        Raises:
            InputError: see `recording` and `speaker`.
        """
        if of is None or isinstance(of, Voice):
            return of or Voice()
        if isinstance(of, Tensor):
            return Voice(of)
        if isinstance(of, Path) or Path(of).is_file():
            return self.recording(of)
        return self.speaker(of)

    def conditions(self, voice: Voice) -> dict[str, str]:
        """The speaker's token, where the model was trained with it."""
        known = self.run.tokenizer.vocabulary.conditioning.get("speaker", ())
        return {"speaker": voice.speaker} if voice.speaker in known else {}

    def frames(self, utterances: Sequence[Utterance]) -> list[int]:
        """Lengths in latent frames: given, or estimated."""
        none = torch.zeros(0, self.run.config.data.latent_channels)
        asked = [each for each in utterances if each.seconds is None]
        timed = []
        for u in asked:
            reference = none if u.voice.reference is None else u.voice.reference
            timed.append(TimedText(u.text, reference, u.voice.speaker, u.voice.text, u.conditions))
        estimates = iter(self.lengths.frames(timed) if timed else [])
        found = []
        for utterance in utterances:
            if utterance.seconds is not None:
                frames = max(1, round(utterance.seconds * self.codec.frames_per_second))
            else:
                frames = next(estimates)
                if utterance.speed != 1.0:
                    frames = max(1, round(frames / utterance.speed))
            found.append(frames)
        return found

    def pieces(self, utterance: Utterance, soon: bool = False) -> list[Utterance]:
        """A text in pieces as long as those that the model was trained on, with their lengths; one of a given
        length whole. `soon` as `split_text` takes it."""
        data, tokenizer = self.run.config.data, self.run.tokenizer

        def sizes(texts: Sequence[str]) -> list[float]:
            tokens = [len(tokenizer.encode(text)) for text in texts]
            frames = self.frames([replace(utterance, text=text) for text in texts])
            return [
                max(n / data.max_text_tokens, length / data.max_frames)
                for n, length in zip(tokens, frames, strict=True)
            ]

        if utterance.seconds is not None:
            return [replace(utterance, text=" ".join(utterance.text.split()))]
        found = [replace(utterance, text=text) for text in split_text(utterance.text, sizes, soon)]
        rate = self.codec.frames_per_second
        lengths = self.frames(found)
        return [replace(each, seconds=n / rate) for each, n in zip(found, lengths, strict=True)]

    def samples(self, pieces: Sequence[Utterance]) -> int:
        """Of the speech of a text's pieces, with the pauses between them, before any is made."""
        silence = len(pause(self.sample_rate)) * (len(pieces) - 1)
        return silence + self.codec.hop_length * sum(self.frames(pieces))

    def requests(self, utterances: Sequence[Utterance]) -> list[SpeechRequest]:
        """What the sampler is asked for."""
        data, found = self.run.config.data, []
        for utterance, frames in zip(utterances, self.frames(utterances), strict=True):
            reference = utterance.voice.reference
            if reference is None:
                reference = torch.zeros(0, data.latent_channels)
            reference = reference[: data.max_speaker_frames]
            conditions = with_duration(utterance.conditions, frames, data.frames_per_second)
            found.append(
                SpeechRequest(utterance.text, reference, frames, conditions, utterance.take)
            )
        return found

    def synthesize(
        self,
        texts: Sequence[str | Utterance],
        voices: "Sequence[str | Path | Tensor | Voice | None]" = (),
        seed: int = 0,
        sampling: Sampling | None = None,
    ) -> list[Speech]:
        """Says the texts, as one batch; what is said does not depend on the others in it.

        Args:
            texts: or utterances, which have voices of their own.
            voices: one for each text, or one for all, as `voice` takes them; without any, nobody's in
                particular.
            sampling: instead of the model's.

        Raises:
            InputError: a voice that is not there, or a text without a length.
        """
        found = [self.voice(each) for each in voices or [None]]
        if len(found) not in (1, len(texts)):
            raise InputError(
                f"{len(texts)} texts with {len(found)} voices; give one for each, or one for all"
            )
        utterances = [
            Utterance(text, voice, self.conditions(voice)) if isinstance(text, str) else text
            for text, voice in zip(texts, found if len(found) > 1 else found * len(texts))
        ]
        return self.speak(self.requests(utterances), seed, sampling) if utterances else []

    def speak(
        self, requests: list[SpeechRequest], seed: int, sampling: Sampling | None = None
    ) -> list[Speech]:
        """The speech of a batch; see `synthesize`."""
        latents = generate_latents(
            self.run.model,
            self.run.tokenizer,
            self.run.objective,
            requests,
            sampling or self.sampling,
            seed,
            self.run.device,
            self.run.text_encoder,
        )
        return [
            Speech(self.codec.decode(each).detach().cpu(), self.codec.sample_rate, each)
            for each in latents
        ]

    def speak_sorted(
        self,
        requests: Sequence[SpeechRequest],
        seed: int,
        batch_size: int,
        sampling: Sampling | None = None,
    ) -> Iterator[tuple[int, Speech]]:
        """(place, its speech) of any number of requests, those of similar length together."""
        order = sorted(range(len(requests)), key=lambda place: requests[place].frames)
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            spoken = self.speak([requests[place] for place in places], seed, sampling)
            yield from zip(places, spoken, strict=True)

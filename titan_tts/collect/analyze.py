"""Analysis of one recording: detect speech, cut it into segments, transcribe and measure each segment.

samples (n, channels) at any rate
  -> mono at 16 kHz -> speech regions (segments)
  -> changes of speaker (speakers) and pauses -> segments (segments)
  -> speaker embeddings (speakers), two transcripts, figures (quality)

Beside the recording itself two copies at 16 kHz are in memory, 230 MB an hour each, and pieces of bounded size.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_tts.collect.quality import NoiseFloor, quality
from titan_tts.collect.segments import (
    RATE,
    Limits,
    SpeechDetector,
    cut,
    frame_power,
    speech_regions,
)
from titan_tts.collect.settings import Settings
from titan_tts.collect.speakers import embed, sound_of, speaker_changes
from titan_tts.prepare.processing import SILENCE_LUFS, clipped_fraction, loudness
from torchtitan.models.dit_tts.speech.audio import resample, to_mono
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer, open_speaker_encoder
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


@dataclass(frozen=True, kw_only=True)
class Segment(Transcript):
    """A part of a recording with one speaker, from `start` to `stop` in seconds, whole milliseconds."""

    start: float
    stop: float
    snr_db: float
    clipped: float  # fraction of the samples at full scale, of all channels
    loudness: float  # LUFS, at least -70
    chars_per_second: float
    embedding: np.ndarray  # (E,) float32
    waveform: np.ndarray  # (samples,) float32 at the recording's rate

    @property
    def quality(self) -> str:
        return quality(vars(self))


class Analyzer:
    """The models, loaded once for many recordings."""

    def __init__(self, settings: Settings, device: str = "cpu") -> None:
        self.settings = settings
        self.detector = SpeechDetector(device)
        self.encoder = open_speaker_encoder(settings.speaker_encoder, device)
        self.transcriber = Transcriber(settings, device)

    def analyze(self, samples: np.ndarray, rate: int) -> list[Segment]:
        """The segments of a recording (n, channels) float32, in order of time; none where nobody speaks."""
        settings = self.settings
        limits = Limits(  # in whole ms, within what was asked for
            math.ceil(1000 * settings.min_seconds),
            math.floor(1000 * settings.max_seconds),
            round(1000 * settings.pause_seconds),
        )
        duration = len(samples) * 1000 // rate
        heard = resample(to_mono(samples), rate, RATE)
        power = frame_power(heard)
        regions = speech_regions(self.detector.probabilities(heard), duration)
        changes = speaker_changes(
            heard, power, regions, self.encoder, settings.change_threshold, limits.joined
        )
        spans = cut(regions, duration, changes, power, limits)
        embeddings = embed(self.encoder, heard, spans)
        transcripts = self.transcriber.transcribe([sound_of(heard, span) for span in spans])
        noise = NoiseFloor(power, regions)
        found = []
        for span, said in zip(spans, transcripts, strict=True):
            start, stop = (round(time * rate / 1000) for time in span)
            part = samples[start:stop]
            waveform = to_mono(part)
            found.append(
                Segment(
                    **vars(said),
                    start=span[0] / 1000,
                    stop=span[1] / 1000,
                    snr_db=noise.snr_db(*span),
                    clipped=clipped_fraction(part),
                    loudness=max(SILENCE_LUFS, loudness(waveform, rate)),
                    chars_per_second=len(said.text) / (span[1] - span[0]) * 1000,
                    embedding=embeddings[span],
                    waveform=waveform,
                )
            )
        return found

"""What is done to a recording: speech is found, cut into segments, written down, and each segment measured.

samples (n, channels) at any rate
  -> mono at 16 kHz -> speech regions (speech_regions)
  -> changes of speaker (speakers) and pauses -> segments (segments)
  -> speaker embeddings (speakers), two transcripts (transcripts), figures (quality)

Beside the recording itself a copy at 16 kHz is in memory, 230 MB an hour, and pieces of bounded size.
"""

import math
from dataclasses import dataclass

import numpy as np

from titan_tts.collect import quality
from titan_tts.collect.segments import Limits, cut
from titan_tts.collect.speakers import as_sound, embed, speaker_changes
from titan_tts.collect.speech_regions import (
    RATE,
    Progress,
    SpeechDetector,
    frame_power,
    mono_16khz,
    speech_regions,
)
from titan_tts.collect.transcripts import Transcriber
from titan_tts.prepare.processing import clipped_fraction
from torchtitan.models.dit_tts.errors import check_range, require
from torchtitan.models.dit_tts.speech.audio import to_mono
from torchtitan.models.dit_tts.speech.scoring.plugins import open_speaker_encoder

_EMBEDDED_AT_ONCE = 64  # segments


@dataclass(frozen=True)
class Settings:
    """How recordings are cut, heard and compared."""

    min_seconds: float = 1.0
    """Shortest segment; shorter speech gets silence around it, or stays with what is next to it."""

    max_seconds: float = 30.0
    """Longest segment; at least twice the shortest."""

    pause_seconds: float = 0.5
    """Pause that ends a segment; speech that is too long is also cut at shorter ones."""

    recognizer: str = "faster-whisper:large-v3"
    """Recognizer of the text: whisper:SIZE_OR_FOLDER, faster-whisper:SIZE_OR_FOLDER or package.module:factory."""

    verbatim_recognizer: str = ""
    """Another recognizer, for the verbatim text and to compare with; empty: the text is the verbatim one, too, there is
    no agreement, and no segment is of high quality."""

    language: str = ""
    """Language code of the recordings, such as en; empty: as the recognizer tells it."""

    speaker_encoder: str = "resemblyzer"
    """Encoder of voices: resemblyzer, xvector:HUB_NAME_OR_FOLDER or package.module:factory."""

    speaker_threshold: float = 0.8
    """Mean cosine of embeddings from which on two groups of segments are one speaker; it depends on the encoder."""

    batch_size: int = 16
    """Segments that a recognizer hears at once, if it can."""

    def check(self) -> None:
        """Raises InputError where a number is out of its range."""
        check_range("--min-seconds", self.min_seconds, 0.2, 30.0)
        check_range("--max-seconds", self.max_seconds, 0.4, 120.0)
        require(
            self.max_seconds >= 2 * self.min_seconds,
            f"--max-seconds = {self.max_seconds}, but it must be at least twice --min-seconds, {self.min_seconds}",
        )
        check_range("--pause-seconds", self.pause_seconds, 0.15, 10.0)
        check_range("--speaker-threshold", self.speaker_threshold, 0.05, 0.99)
        check_range("--batch-size", self.batch_size, 1, 1024)

    def limits(self) -> Limits:
        """In whole ms, within what was asked for."""
        shortest, longest = math.ceil(1000 * self.min_seconds), math.floor(1000 * self.max_seconds)
        return Limits(shortest, longest, round(1000 * self.pause_seconds))


@dataclass(frozen=True)
class Segment:
    """A part of a recording with one speaker, from `start` to `stop` in seconds, whole milliseconds."""

    start: float
    stop: float
    text: str
    text_verbatim: str  # the text where there is one recognizer
    agreement: float | None  # of the two texts, 0 to 1; None where there is one recognizer
    language: str  # as the recognizer tells it, else the setting
    snr_db: float
    clipped: float  # fraction of the samples at full scale, of all channels
    loudness: float  # LUFS, at least -70
    chars_per_second: float
    overlap: float | None  # fraction with two voices at once; None: not measured
    embedding: np.ndarray  # (E,) float32
    waveform: np.ndarray  # (samples,) float32 at the recording's rate

    @property
    def quality(self) -> str:
        return quality.label(
            self.text,
            self.language,
            self.agreement,
            self.snr_db,
            self.clipped,
            self.chars_per_second,
            self.overlap,
        )


def no_progress(stage: str, seconds: float) -> None:
    """For callers that do not watch."""


class Analyzer:
    """The models, loaded once for many recordings."""

    def __init__(self, settings: Settings, device: str = "cpu") -> None:
        settings.check()
        self.settings = settings
        self.detector = SpeechDetector(device)
        self.encoder = open_speaker_encoder(settings.speaker_encoder, device)
        self.transcriber = Transcriber(
            settings.recognizer,
            settings.verbatim_recognizer,
            settings.language,
            device,
            settings.batch_size,
        )

    def analyze(
        self, samples: np.ndarray, rate: int, progress: Progress = no_progress
    ) -> list[Segment]:
        """The segments of a recording (n, channels) float32, in order of time; none where nobody speaks.

        progress(stage, seconds): of the stages speech, speakers, voices and text, with seconds of the recording, or of
        its segments, that are done.
        """
        limits = self.settings.limits()
        duration = len(samples) * 1000 // rate
        heard = mono_16khz(samples, rate)
        power = frame_power(heard)
        regions = speech_regions(self.detector.probabilities(heard, progress), duration)
        changes = speaker_changes(
            heard,
            power,
            regions,
            self.encoder,
            self.settings.speaker_threshold,
            limits.pause,
            progress,
        )
        spans = cut(regions, duration, changes, power, limits)
        sounds = {
            span: as_sound(heard[span[0] * RATE // 1000 : span[1] * RATE // 1000]) for span in spans
        }
        embeddings: dict[tuple[int, int], np.ndarray] = {}
        for first in range(0, len(spans), _EMBEDDED_AT_ONCE):
            some = spans[first : first + _EMBEDDED_AT_ONCE]
            vectors = embed(self.encoder, [sounds[span] for span in some])
            embeddings |= zip(some, vectors, strict=True)
            progress("voices", some[-1][1] / 1000)
        transcripts = self.transcriber.transcribe(sounds, progress)
        noise = quality.NoiseFloor(power, regions)
        found = []
        for span in spans:
            start, stop = (round(time * rate / 1000) for time in span)
            part = samples[start:stop]
            waveform = to_mono(part)
            said = transcripts[span]
            seconds = (span[1] - span[0]) / 1000
            found.append(
                Segment(
                    start=span[0] / 1000,
                    stop=span[1] / 1000,
                    text=said.text,
                    text_verbatim=said.text_verbatim,
                    agreement=said.agreement,
                    language=said.language,
                    snr_db=noise.snr_db(*span),
                    clipped=clipped_fraction(part),
                    loudness=quality.loudness_lufs(waveform, rate),
                    chars_per_second=quality.chars_per_second(said.text, seconds),
                    overlap=None,
                    embedding=embeddings[span],
                    waveform=waveform,
                )
            )
        return found

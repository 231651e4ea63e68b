"""What is done to a recording: speech is found, cut into segments, written down, and each segment measured.

samples (n, channels) at any rate
  -> mono at 16 kHz -> speech regions (speech_regions)
  -> changes of speaker (speakers) and pauses -> segments (segments)
  -> speaker embeddings (speakers), two transcripts (transcripts), figures (quality)

Beside the recording itself two copies at 16 kHz are in memory, 230 MB an hour each, and pieces of bounded size.
"""

import math
from dataclasses import dataclass

import numpy as np

from titan_tts.collect.quality import Figures, NoiseFloor
from titan_tts.collect.segments import Limits, cut
from titan_tts.collect.settings import Settings
from titan_tts.collect.speakers import embed, sound_of, speaker_changes
from titan_tts.collect.speech_regions import (
    RATE,
    Progress,
    SpeechDetector,
    frame_power,
    speech_regions,
)
from titan_tts.collect.transcripts import Transcriber
from titan_tts.prepare.processing import SILENCE_LUFS, clipped_fraction, loudness
from torchtitan.models.dit_tts.speech.audio import resample, to_mono
from torchtitan.models.dit_tts.speech.scoring.plugins import open_speaker_encoder


@dataclass(frozen=True, kw_only=True)
class Segment(Figures):
    """A part of a recording with one speaker, from `start` to `stop` in seconds, whole milliseconds."""

    start: float
    stop: float
    embedding: np.ndarray  # (E,) float32
    waveform: np.ndarray  # (samples,) float32 at the recording's rate


class Analyzer:
    """The models, loaded once for many recordings."""

    def __init__(self, settings: Settings, device: str = "cpu") -> None:
        self.settings = settings
        self.detector = SpeechDetector(device)
        self.encoder = open_speaker_encoder(settings.speaker_encoder, device)
        self.transcriber = Transcriber(settings, device)

    def analyze(self, samples: np.ndarray, rate: int, progress: Progress) -> list[Segment]:
        """The segments of a recording (n, channels) float32, in order of time; none where nobody speaks.

        progress(stage, seconds): of the stages speech, speakers, voices and text, with seconds of the recording, or of
        its segments, that are done.
        """
        shortest, longest = self.settings.min_seconds, self.settings.max_seconds
        limits = Limits(  # in whole ms, within what was asked for
            math.ceil(1000 * shortest),
            math.floor(1000 * longest),
            round(1000 * self.settings.pause_seconds),
        )
        duration = len(samples) * 1000 // rate
        heard = resample(to_mono(samples), rate, RATE)
        power = frame_power(heard)
        regions = speech_regions(self.detector.probabilities(heard, progress), duration)
        threshold = self.settings.change_threshold
        changes = speaker_changes(
            heard, power, regions, self.encoder, threshold, limits.joined, progress
        )
        spans = cut(regions, duration, changes, power, limits)
        embeddings = embed(self.encoder, heard, spans)
        progress("voices", duration / 1000)
        sounds = {span: sound_of(heard, span) for span in spans}
        transcripts = self.transcriber.transcribe(sounds, progress)
        noise = NoiseFloor(power, regions)
        found = []
        for span in spans:
            start, stop = (round(time * rate / 1000) for time in span)
            part = samples[start:stop]
            waveform = to_mono(part)
            said = transcripts[span]
            found.append(
                Segment(
                    **vars(said),
                    start=span[0] / 1000,
                    stop=span[1] / 1000,
                    snr_db=noise.snr_db(*span),
                    clipped=clipped_fraction(part),
                    loudness=max(SILENCE_LUFS, loudness(waveform, rate)),
                    chars_per_second=len(said.text) / (span[1] - span[0]) * 1000,
                    overlap=None,
                    embedding=embeddings[span],
                    waveform=waveform,
                )
            )
        return found

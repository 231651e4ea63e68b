"""Long recordings whose every sentence, speaker and level is known: flite's and espeak-ng's voices in conversation.

Each has two to four speakers in turns, pauses of drawn lengths, turns without a pause and turns that overlap,
stretches of tones and of nothing but noise, and a level of noise of its own.
"""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.sentences.corpus import NEW_VOICE, VOICES, Voice, speak
from benchmarks.sentences.grammar import sentences
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.speech.audio import resample

RATE = 24_000
ESPEAK = "espeak"
SPEAKERS = (*VOICES, NEW_VOICE, Voice("high", "rms", 1.12), Voice(ESPEAK, ""))
SECONDS = 360  # of a recording
_QUIET = 10 ** (-40 / 20)  # of a sentence's loudest sample: below is its silence
_SHORT_PAUSE = 0.2  # s inside a sentence; shorter silence belongs to the speech


@dataclass(frozen=True)
class Spoken:
    """A sentence in a recording; `speech` are the parts of it, in s, that are not silence."""

    start: float
    stop: float
    text: str
    speaker: str
    level: float  # mean square of its speech
    speech: list[tuple[float, float]]


@dataclass(frozen=True)
class Recording:
    samples: np.ndarray  # (n,) float32 at RATE
    sentences: list[Spoken]
    noise: float  # mean square


def make(hours: float, seed: int, folder: Path) -> Iterator[Recording]:
    """Recordings of 6 minutes; a sentence that is in `folder` is not spoken again."""
    for program in ("flite", "espeak-ng"):
        require(shutil.which(program) is not None, f"the program {program} is missing; install it")
    folder.mkdir(parents=True, exist_ok=True)
    texts = sentences(seed, "heldout")
    for number in range(max(1, round(hours * 3600 / SECONDS))):
        yield _recording(np.random.default_rng([seed, number]), texts, folder)


def _recording(draw: np.random.Generator, texts: Iterator[str], folder: Path) -> Recording:
    voices = draw.permutation(len(SPEAKERS))[: draw.integers(2, 5)]
    gains = {SPEAKERS[v].name: 10 ** (draw.uniform(-9, 0) / 20) for v in voices}
    samples = np.zeros((SECONDS + 60) * RATE, np.float32)
    spoken: list[Spoken] = []
    now, voice = float(draw.uniform(0.5, 5)), SPEAKERS[voices[0]]
    while now < SECONDS - 20:
        for _ in range(draw.integers(1, 5)):
            text = next(texts)
            wave = gains[voice.name] * _sentence(text, voice, folder)
            spoken.append(_add(samples, wave, now, text, voice.name))
            now = spoken[-1].stop + float(draw.uniform(0.15, 1.2))
        others = [SPEAKERS[v] for v in voices if SPEAKERS[v] is not voice]
        voice = others[draw.integers(len(others))]
        kind = draw.random()
        if kind < 0.1:
            now = spoken[-1].stop - float(draw.uniform(0.3, 1.0))
        elif kind < 0.25:
            now = spoken[-1].stop
        elif kind < 0.85:
            now = spoken[-1].stop + float(draw.uniform(0.1, 3.0))
        else:
            now += 1.0
            length = float(draw.uniform(3, 10))
            if kind < 0.93:
                samples[round(now * RATE) :][: round(length * RATE)] += _chord(draw, length)
            now += length + 1.0
    samples = samples[: round((spoken[-1].stop + draw.uniform(0.3, 5)) * RATE)]
    loud = float(np.mean([each.level for each in spoken]))
    noise = loud / 10 ** (draw.uniform(8, 40) / 10)
    samples += np.sqrt(noise) * draw.standard_normal(len(samples)).astype(np.float32)
    return Recording(samples, spoken, noise)


def _sentence(text: str, voice: Voice, folder: Path) -> np.ndarray:
    """(n,) at RATE, without silence before and after."""
    name = "".join(c if c.isalnum() else "_" for c in text.lower())[:120]
    path = folder / f"{voice.name}-{name}.wav"
    if voice.name == ESPEAK:
        if not path.exists():
            subprocess.run(["espeak-ng", "-v", "en-us", "-w", path, text], check=True)
    else:
        speak(text, voice, path)
    samples, rate = soundfile.read(path, dtype="float32")
    samples = resample(samples, rate, RATE)
    heard = np.flatnonzero(np.abs(samples) > _QUIET * np.abs(samples).max())
    return samples[heard[0] : heard[-1] + 1] * (0.35 / np.abs(samples).max())


def _add(samples: np.ndarray, wave: np.ndarray, at: float, text: str, speaker: str) -> Spoken:
    first = round(at * RATE)
    samples[first : first + len(wave)] += wave
    heard = np.flatnonzero(np.abs(wave) > _QUIET * np.abs(wave).max())
    parts = np.split(heard, np.flatnonzero(np.diff(heard) > _SHORT_PAUSE * RATE) + 1)
    speech = [((first + int(p[0])) / RATE, (first + int(p[-1]) + 1) / RATE) for p in parts]
    level = float(np.concatenate([np.square(wave[p[0] : p[-1] + 1]) for p in parts]).mean())
    return Spoken(first / RATE, (first + len(wave)) / RATE, text, speaker, level, speech)


def _chord(draw: np.random.Generator, seconds: float) -> np.ndarray:
    """Tones with overtones that change twice a second, as music has."""
    time = np.arange(RATE // 2) / RATE
    out = []
    while len(out) < 2 * seconds:
        notes = 220 * 2 ** (draw.integers(0, 24, 3) / 12)
        sound = sum(np.sin(2 * np.pi * n * k * time) / k for n in notes for k in (1, 2, 3))
        out.append(0.04 * sound * np.exp(-3 * time))
    return np.concatenate(out)[: round(seconds * RATE)].astype(np.float32)

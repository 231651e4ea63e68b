"""Processing of a decoded recording to the waveform that is encoded: silence, loudness, filters.

decoded (n, channels) at any rate
  -> mean of the channels, the codec's rate
  -> silence before and after the speech capped
  -> loudness brought to a level (ITU-R BS.1770), the peak kept below full scale
  -> kept, or dropped for one of REASONS
"""

import math
from dataclasses import dataclass

import numpy as np

from titan_tts.prepare.settings import AudioSettings
from torchtitan.models.dit_tts.speech.audio import resample, to_mono

REASONS = {
    "undecodable": "missing, corrupt, incomplete or not audio",
    "not_wanted": "not as --where asks",
    "empty_text": "its text is empty",
    "silent": "quieter than -70 LUFS throughout",
    "clipped": "more samples at full scale than --max-clipped",
    "too_short": "below --min-seconds",
    "too_long": "above --max-seconds",
    "chars_per_second_low": "below --min-chars-per-second",
    "chars_per_second_high": "above --max-chars-per-second",
}
"""reason why a recording was left out -> in words"""

FULL_SCALE = 32767 / 32768  # the largest 16-bit sample
SILENCE_LUFS = -70.0  # the absolute gate of BS.1770
LOUDNESS_BLOCK_SECONDS = 0.4
FRAME_SECONDS = 0.01
# Speech reaches from its loudest vowels 40 dB down to weak fricatives. A noise floor above that
# raises the threshold, but never to less than 20 dB below the loud part.
QUIET_DB, NOISY_DB, ABOVE_NOISE_DB = 40.0, 20.0, 6.0


@dataclass(frozen=True)
class Processed:
    """A waveform (samples,) float32 at the codec's rate, and what was done to it."""

    waveform: np.ndarray
    seconds: float
    gain_db: float | None = None  # None: the level was left alone


def process(
    samples: np.ndarray,
    rate: int,
    target_rate: int,
    text: str,
    settings: AudioSettings,
    longest: int | None = None,
) -> Processed | str:
    """The waveform to encode, or the reason (of REASONS) to drop the recording. `longest`: samples at the target rate
    behind which it is cut, before its loudness is measured."""
    if settings.max_clipped is not None and clipped_fraction(samples) > settings.max_clipped:
        return "clipped"
    waveform = resample(to_mono(samples), rate, target_rate)
    if len(waveform) == 0:
        return "silent" if settings.min_seconds is None else "too_short"
    if settings.max_silence is not None:
        start, stop = speech_span(waveform, target_rate, settings.max_silence)
        waveform = np.ascontiguousarray(waveform[start:stop])
    waveform = waveform[:longest]
    seconds = len(waveform) / target_rate
    if reason := length_reason(seconds, text, settings):
        return reason
    measured = loudness(waveform, target_rate)
    if measured <= SILENCE_LUFS:
        return "silent"
    gain_db = None
    if settings.loudness is not None:
        gain_db = safe_gain(waveform, settings.loudness - measured)
        waveform = waveform * np.float32(10 ** (gain_db / 20))
    return Processed(waveform, seconds, gain_db)


def clipped_fraction(samples: np.ndarray) -> float:
    """Fraction of the values that lie at full scale."""
    return np.count_nonzero(np.abs(samples) >= FULL_SCALE) / samples.size


def length_reason(seconds: float, text: str, settings: AudioSettings) -> str | None:
    """The reason to drop a recording by its length and its text's length, if any."""
    rate = len(text.strip()) / seconds
    for value, limit, above, reason in (
        (seconds, settings.min_seconds, False, "too_short"),
        (seconds, settings.max_seconds, True, "too_long"),
        (rate, settings.min_chars_per_second, False, "chars_per_second_low"),
        (rate, settings.max_chars_per_second, True, "chars_per_second_high"),
    ):
        if limit is not None and (value > limit if above else value < limit):
            return reason
    return None


def loudness(waveform: np.ndarray, rate: int) -> float:
    """Integrated loudness of (samples,) in LUFS; -inf where nothing passes the gates.

    A waveform shorter than the standard's block of 0.4 s is measured as one block.
    """
    import pyloudnorm

    # A little shorter than the waveform: rounding must not make the block longer than it.
    block = min(LOUDNESS_BLOCK_SECONDS, len(waveform) / rate * (1 - 1e-9))
    step = block / 4  # the standard's overlap of 75 %
    steps = int((len(waveform) / rate - block) / step + 1e-9)
    # The standard leaves an incomplete last block out; pyloudnorm would count it as a quiet one. Of
    # its filters, DeMan's are the standard's at 48 kHz; the default's are 0.04 dB off.
    measured = waveform[: math.ceil((block + steps * step) * rate)].astype(np.float64)
    meter = pyloudnorm.Meter(rate, filter_class="DeMan", block_size=block)
    value = meter.integrated_loudness(measured)
    return float(value) if math.isfinite(value) else -math.inf


def safe_gain(waveform: np.ndarray, wanted_db: float) -> float:
    """The gain in dB to the thousandth with which no sample comes to exceed 1."""
    headroom_db = -20 * math.log10(float(np.abs(waveform).max()))
    return math.floor(1000 * min(wanted_db, headroom_db)) / 1000


def speech_span(waveform: np.ndarray, rate: int, max_silence: float) -> tuple[int, int]:
    """(start, stop) in samples: the speech and at most `max_silence` seconds on each side of it.

    A frame of 10 ms belongs to the speech where its energy lies above a threshold, in the waveform
    or in its first difference (which brings weak fricatives above hum). Without any such frame
    everything is kept.
    """
    hop = max(1, round(FRAME_SECONDS * rate))
    centred = waveform - waveform.mean(dtype=np.float64).astype(np.float32)
    frames = -(-len(centred) // hop)
    active = np.zeros(frames, dtype=bool)
    for signal in (centred, np.diff(centred, prepend=centred[:1])):
        padded = np.zeros(frames * hop, dtype=np.float32)
        padded[: len(signal)] = signal
        power = np.square(padded).reshape(frames, hop).mean(axis=1, dtype=np.float64)
        if power.max() == 0:
            continue
        level = 10 * np.log10(np.maximum(power, 1e-20))
        loud, floor = np.percentile(level, 95), np.percentile(level, 5)
        # A word between long pauses is less than a twentieth of all frames.
        loud = max(loud, level.max() - 10)
        active |= level > max(loud - QUIET_DB, min(floor + ABOVE_NOISE_DB, loud - NOISY_DB))
    speech = np.flatnonzero(active)
    if len(speech) == 0:
        return 0, len(waveform)
    kept = round(max_silence * rate)
    start = max(0, int(speech[0]) * hop - kept)
    return start, min(len(waveform), (int(speech[-1]) + 1) * hop + kept)

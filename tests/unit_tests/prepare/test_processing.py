"""Loudness, silence and filters against figures that are known beforehand."""

import cmath
import math

import numpy as np
import pytest

from tests.helpers.speech_corpora import AS_IS, RATE, tone
from titan_tts.prepare.processing import Processed, loudness, process, speech_span
from titan_tts.prepare.settings import AudioSettings


def k_weighted_level(hertz: float, level: float) -> float:
    """LUFS of a steady sine by the filters of ITU-R BS.1770-4 at 48 kHz."""
    z = cmath.exp(-2j * math.pi * hertz / 48_000)
    shelf = (1.53512485958697 - 2.69169618940638 * z + 1.19839281085285 * z**2) / (
        1 - 1.69065929318241 * z + 0.73248077421585 * z**2
    )
    high_pass = (1 - 2 * z + z**2) / (1 - 1.99004745483398 * z + 0.99007225036621 * z**2)
    return -0.691 + 10 * math.log10(level**2 / 2 * abs(shelf * high_pass) ** 2)


@pytest.mark.parametrize("hertz", [60, 997, 6000])
def test_loudness_of_a_sine(hertz):
    found = loudness(tone(3, 0.1, 48_000, hertz), 48_000)
    assert found == pytest.approx(k_weighted_level(hertz, 0.1), abs=0.05)
    # Two loud seconds and two quiet ones: of the blocks of 0.4 s each 0.1 s, 17 are loud and three partly.
    parts = [tone(2, level, 48_000, hertz) for level in (0.1, 0.001)]
    gated = k_weighted_level(hertz, 0.1) + 10 * math.log10((17 + 1.5) / 20)
    assert loudness(np.concatenate(parts), 48_000) == pytest.approx(gated, abs=0.05)
    # Also below the standard's block of 0.4 s, of whatever length rounding makes it.
    for seconds in (0.399, 0.4, 0.401):
        expected = k_weighted_level(997, 0.1)
        assert loudness(tone(seconds), RATE) == pytest.approx(expected, abs=0.5)
    noise = (0.1 * np.random.default_rng(0).standard_normal(500)).astype("f4")
    assert all(-40 < loudness(noise[:samples], 24_000) < 0 for samples in range(5, 500, 45))


@pytest.mark.parametrize("wanted, level", [(-30.0, 0.1), (-16.0, 0.02)])
def test_the_level_after_silence_is_cut_is_the_wanted_one(wanted, level):
    silence = np.zeros(2 * 48_000, np.float32)
    samples = np.concatenate([silence, tone(3, level, 48_000), silence])[:, None]
    done = process(samples, 48_000, 48_000, "x", AudioSettings(loudness=wanted))
    assert isinstance(done, Processed)
    # The silence that is kept, 0.25 s on each side, is in a few of the blocks.
    middle = done.waveform[48_000:96_000]
    gain = 20 * math.log10(float(np.abs(middle).max()) / level)
    assert gain == pytest.approx(wanted - k_weighted_level(997, level), abs=0.5)
    assert done.gain_db == pytest.approx(gain, abs=0.01)


def test_a_peak_limits_the_gain():
    samples = tone(2, 0.02)
    samples[16_000] = -0.9
    done = process(samples[:, None], RATE, RATE, "x", AudioSettings(max_silence=None))
    assert done.gain_db == pytest.approx(-20 * math.log10(0.9), abs=2e-3)
    assert 0.999 < np.abs(done.waveform).max() <= 1


def test_speech_is_from_the_begin_of_its_first_frame_to_the_end_of_its_last():
    sound = np.zeros(4000, np.float32)
    sound[1000:2999] = np.resize([0.5, -0.5], 1999)  # frames of 10 samples: 100 to 299
    assert speech_span(sound, 1000, 0.0) == (1000, 3000)
    assert speech_span(sound, 1000, 0.25) == (750, 3250)


def test_silence_is_cut_to_the_seconds_that_are_kept():
    """One second before, two behind; a pause and a word 30 dB down belong to the speech, an offset
    of the recording's level does not."""
    word = tone(1, 0.1 * 10**-1.5)
    parts = (np.zeros(RATE), tone(1), np.zeros(RATE // 2), word, np.zeros(2 * RATE))
    samples = (np.concatenate(parts) + 0.05).astype(np.float32)[:, None]
    settings = AudioSettings(loudness=None, max_silence=0.25, max_seconds=3.02)
    done = process(samples, RATE, RATE, "x", settings)
    assert isinstance(done, Processed)
    assert done.seconds == len(done.waveform) / RATE == pytest.approx(3.0, abs=0.011)
    start = round(0.75 * RATE)
    assert np.abs(done.waveform[:RATE] - samples[start : start + RATE, 0]).max() < 1e-6


@pytest.mark.parametrize("text", ["four", "  four  "])
def test_what_is_at_a_limit_is_kept(text):
    samples = np.stack([tone(1), tone(1)], 1)
    # A twentieth of all values: the largest of 16 bits, its negative, and the smallest.
    samples[:1600:2, 0], samples[1:1600:4, 0] = 32767 / 32768, -32767 / 32768
    samples[3:1600:4, 0] = -1.0
    at = AudioSettings(None, None, 1.0, 1.0, 4.0, 4.0, 0.05)
    assert isinstance(process(samples, RATE, RATE, text, at), Processed)
    below = AudioSettings(None, None, max_clipped=0.0499)
    assert process(samples, RATE, RATE, text, below) == "clipped"
    for settings in (AudioSettings(), AS_IS):
        # The last: hiss of -76 dB, whose peaks are above -70.
        hiss = 1.5e-4 * np.random.default_rng(0).standard_normal((8000, 1))
        assert np.abs(hiss).max() > 10 ** (-70 / 20)
        silences = np.zeros((8000, 1), "f4"), np.full((8000, 2), 1e-5, "f4"), hiss.astype("f4")
        for silence in silences:
            assert process(silence, RATE, RATE, "x", settings) == "silent"
        # No sample is left at the lower rate.
        assert process(np.full((1, 1), 0.5, "f4"), 96_000, RATE, "x", settings) == "silent"
    short = AudioSettings(min_seconds=0.1)
    assert process(np.full((1, 1), 0.5, "f4"), 96_000, RATE, "x", short) == "too_short"
    assert speech_span(np.zeros(5000, "f4"), RATE, 0.25) == (0, 5000)

"""Figures of quality against signals whose figures are known."""

import numpy as np
import pytest

from titan_tts.collect.quality import HIGH, MAX_SNR_DB, NoiseFloor, quality


def test_snr_is_speech_over_the_noise_of_the_nearest_pauses():
    power = np.full(3000, 0.01)
    power[1000:2000] = 1.01  # speech of power 1 in noise of 0.01
    power[2200:] = 5.0  # music that is farther away than a second of pauses
    floor = NoiseFloor(power, np.array([[10_000, 20_000]]))
    assert floor.snr_db(9900, 20_100) == pytest.approx(20.0)
    assert floor.snr_db(12_000, 15_000) == pytest.approx(20.0)
    assert floor.snr_db(3000, 4000) == -MAX_SNR_DB  # nobody speaks there
    power[:1000] = 0.0
    power[2000:2200] = 0.0
    assert NoiseFloor(power, np.array([[10_000, 20_000]])).snr_db(9900, 20_100) == MAX_SNR_DB


def test_frames_next_to_speech_tell_no_noise():
    power = np.full(1000, 0.1)
    power[200:400] = 10.1
    power[400:409] = power[191:200] = 3.0  # what the detector has missed of a word
    found = NoiseFloor(power, np.array([[2000, 4000]])).snr_db(2000, 4000)
    assert found == pytest.approx(20.0)


def test_snr_without_pauses_is_told_by_the_quietest_frames():
    power = np.full(1000, 1.0)
    power[::10] = 0.1
    found = NoiseFloor(power, np.array([[0, 10_000]])).snr_db(0, 10_000)
    assert found == pytest.approx(10 * np.log10((0.91 - 0.1) / 0.1))


GOOD = dict(text="words", language="en", agreement=0.95, snr_db=30.0, clipped=0.0)
GOOD |= {"chars_per_second": 15.0}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, "high"),
        ({"agreement": HIGH.agreement}, "high"),
        ({"agreement": 0.89}, "medium"),
        ({"agreement": 0.59}, "low"),
        ({"agreement": None}, "medium"),
        ({"agreement": None, "confidence": 0.41}, "medium"),
        ({"agreement": None, "confidence": 0.39}, "low"),
        ({"confidence": 0.1}, "high"),  # two recognizers have heard the same
        ({"snr_db": 19.0}, "medium"),
        ({"snr_db": 4.0}, "low"),
        ({"clipped": 0.005}, "medium"),
        ({"clipped": 0.02}, "low"),
        ({"chars_per_second": 5.0}, "medium"),
        ({"chars_per_second": 30.0}, "medium"),
        ({"chars_per_second": 2.0}, "low"),
        ({"chars_per_second": 40.0}, "low"),
        ({"chars_per_second": 5.0, "language": "zh"}, "high"),
        ({"chars_per_second": 15.5, "language": "Chinese"}, "low"),
        ({"text": ""}, "low"),
    ],
)
def test_labels(change, wanted):
    assert quality(GOOD | change) == wanted

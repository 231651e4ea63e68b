"""Where speech is: pieces heard at once against one after the other, and regions of probabilities by hand."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from titan_tts.collect import segments as regions
from titan_tts.collect.segments import SpeechDetector, frame_power, speech_regions

RATE, FRAME = 16_000, 512
SPEECH = Path(__file__).parents[1] / "speech/scoring/lost_by_the_lattice.flac"


class Recent:
    """A network with a memory: half of what it said last, and the frame's mean."""

    def reset_states(self):
        self.last = 0.0

    def __call__(self, frames, rate):
        assert rate == RATE and frames.shape[1] == FRAME
        self.last = 0.5 * self.last + frames.mean(1, keepdim=True)
        return self.last


def test_pieces_together_are_as_the_recording_from_start_to_end(monkeypatch):
    """Two rounds of pieces and a part of one; what is 32 frames ago weighs 2**-32."""
    monkeypatch.setattr(regions, "_PIECE", 50)
    monkeypatch.setattr(regions, "_PIECES", 3)
    detector = SpeechDetector.__new__(SpeechDetector)
    detector.network, detector.device = Recent(), "cpu"
    frames = 50 * 3 * 2 + 77
    samples = np.random.default_rng(0).random(frames * FRAME - 100).astype(np.float32)
    found = detector.probabilities(samples)
    means = np.pad(samples, (0, 100)).reshape(frames, FRAME).mean(1)
    last, wanted = 0.0, []
    for mean in means:
        wanted.append(last := 0.5 * last + mean)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert len(detector.probabilities(samples[:0])) == 0


@pytest.mark.long
@pytest.mark.skipif(find_spec("silero_vad") is None, reason="silero-vad is not installed")
def test_speech_is_found_between_noise():
    samples, rate = soundfile.read(SPEECH, dtype="float32")
    speech = soxr.resample(samples, rate, RATE)
    quiet = 1e-3 * np.random.default_rng(0).standard_normal(3 * RATE).astype(np.float32)
    waveform = np.concatenate([quiet, speech, quiet])
    found = speech_regions(SpeechDetector().probabilities(waveform), 10**6)
    first, last = 3000, 3000 + len(speech) * 1000 // RATE
    assert first - 100 <= found[0, 0] and found[-1, 1] <= last + 200
    assert (found[:, 1] - found[:, 0]).sum() > 0.5 * (last - first)


def spans(text, duration=10**6):
    """Frames as letters: s speech, . silence, ? what is neither."""
    values = {"s": 0.9, ".": 0.1, "?": 0.4}
    found = speech_regions(np.array([values[each] for each in text]), duration)
    return [(start / 32, stop / 32) for start, stop in found.tolist()]


def test_regions_of_speech():
    assert spans("....ssssss....") == [(4, 10)]
    assert spans("????ssss????....") == [(4, 12)]  # goes on as it was
    assert spans("....??????....") == spans("") == spans("....") == []
    assert spans("sssss...sssss") == [(0, 13)]  # a short pause
    assert spans("sssss....sssss") == [(0, 5), (9, 14)]
    assert spans("....sss....") == []  # short speech
    assert spans("....sss..sss....") == [(4, 12)]  # short pauses are closed first
    assert spans("sss........ssss") == [(11, 15)]
    assert spans(".sssss..") == [(1, 6)]  # the start and the end are no pauses
    assert spans("..sssss", duration=220) == [(2, 220 / 32)]


def test_power_of_frames():
    waveform = np.concatenate([np.full(160, 0.5), np.full(160, -2.0), np.ones(159)]).astype(
        np.float32
    )
    assert frame_power(waveform).tolist() == [0.25, 4.0]

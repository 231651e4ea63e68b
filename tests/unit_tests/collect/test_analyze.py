"""A recording from samples to segments, with models that are known."""

import re
import sys

import numpy as np
import pytest

from tests.helpers.sentences import refused
from titan_tts.collect import analyze
from titan_tts.collect.analyze import Analyzer, Segment
from titan_tts.collect.settings import Settings

RATE = 24_000
MODELS = '''
import numpy as np
class Hears:
    """Writes down how long a sound is and how high."""
    def __init__(self, device, word): self.name, self.word = word, word
    def check_texts(self, texts, languages=()): pass
    def transcribe(self, sound, language=""):
        hertz = np.abs(np.fft.rfft(sound.waveform.numpy())).argmax() / sound.seconds
        return f"{self.word} tone of {round(hertz / 100) * 100} for {sound.seconds:.1f}"
class Voices:
    name = "voices"
    def __init__(self, device): pass
    def embed(self, sounds):
        high = [np.abs(np.fft.rfft(s.waveform.numpy(), 16000)).argmax() > 400 for s in sounds]
        return np.eye(2, dtype=np.float32)[np.array(high, int)]
'''


@pytest.fixture
def settings(tmp_path, monkeypatch):
    (tmp_path / "known_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "known_models", raising=False)
    monkeypatch.setattr(analyze, "SpeechDetector", Loud)
    monkeypatch.setattr(analyze, "_BATCH", 2)
    return Settings(
        recognizer="known_models:Hears:a",
        verbatim_recognizer="known_models:Hears:the",
        speaker_encoder="known_models:Voices",
        language="en",
    )


class Loud:
    """Speech is what is loud."""

    def __init__(self, device):
        pass

    def probabilities(self, waveform):
        frames = waveform[: len(waveform) // 512 * 512].reshape(-1, 512)
        return np.square(frames).mean(1) / 0.01


def recording(*parts):
    """(n, 2) of (Hz, seconds) with a little noise in which both channels differ."""
    waves = [0.4 * np.sin(2 * np.pi * h * np.arange(round(s * RATE)) / RATE) for h, s in parts]
    mono = np.concatenate(waves)[:, None]
    noise = np.random.default_rng(0).standard_normal((len(mono), 2))
    return (mono + 1e-3 * noise).astype(np.float32)


def test_each_segment_has_its_own_figures(settings):
    tones, lengths = (
        (0, 300, 0, 600, 0, 300, 0, 300, 600, 0),
        (1.5, 3, 1, 2, 0.8, 4, 0.9, 1.3, 2, 1),
    )
    samples = recording(*zip(tones, lengths, strict=True))
    found = Analyzer(settings).analyze(samples, RATE)
    starts = [1.5, 5.5, 8.3, 14.5]  # what one voice says after 0.9 s is joined
    assert [each.start for each in found] == pytest.approx(starts, abs=0.4)
    assert [each.stop for each in found] == pytest.approx([4.5, 7.5, 14.5, 16.5], abs=0.4)
    for each, hertz in zip(found, [300, 600, 300, 600], strict=True):
        number, seconds = re.fullmatch(r"a tone of (\d+) for (\S+)", each.text).groups()
        length = each.stop - each.start
        assert int(number) == hertz and float(seconds) == pytest.approx(length, abs=0.06)
        assert each.text_verbatim == "the" + each.text.removeprefix("a")
        assert each.agreement == pytest.approx(1 - 1 / 6, abs=0.1)
        assert each.embedding.tolist() == [hertz < 400, hertz > 400]
        first, last = (round(time * RATE) for time in (each.start, each.stop))
        np.testing.assert_allclose(each.waveform, samples[first:last].mean(axis=1), atol=1e-7)
        assert each.start == round(each.start, 3) and each.stop == round(each.stop, 3)
        # 0.4 of a sine has the power 0.08; of the two channels' noise half is left, two thirds of it below 8 kHz.
        assert each.snr_db == pytest.approx(10 * np.log10(0.08 / (1e-6 / 3)), abs=1.5)
        assert each.clipped == 0 and each.language == "en"
        assert each.loudness == pytest.approx(-11.6, abs=1.5)
        assert each.chars_per_second == pytest.approx(len(each.text) / length)
        assert each.quality == "medium"  # one word of six is another


def test_clipping_is_counted_in_all_channels(settings):
    samples = recording((0, 1), (300, 2), (0, 1))
    samples[RATE : 2 * RATE, 0] = 1.0
    (found,) = Analyzer(settings).analyze(samples, RATE)
    assert found.clipped == pytest.approx(0.25, abs=0.02)


def test_one_recognizer_and_a_recording_without_speech(settings):
    alone = Settings(recognizer=settings.recognizer, speaker_encoder=settings.speaker_encoder)
    analyzer = Analyzer(alone)
    (found,) = analyzer.analyze(recording((300, 2)), RATE)
    assert isinstance(found, Segment) and found.text and found.text_verbatim is None
    assert found.agreement is None and found.language == "" and found.quality != "high"
    assert analyzer.analyze(recording((0, 3)), RATE) == []
    assert analyzer.analyze(np.zeros((0, 1), np.float32), RATE) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"min_seconds": 0.0}, "--min-seconds = 0.0"),
        ({"min_seconds": 16.0}, "at least twice --min-seconds"),
        ({"max_seconds": 500.0}, "--max-seconds = 500.0"),
        ({"pause_seconds": 0.0}, "--pause-seconds"),
        ({"speaker_threshold": 1.0}, "--speaker-threshold"),
        ({"recognizer": "whisper:tiny", "verbatim_recognizer": "whisper:tiny"}, "are both"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(change, words):
    Settings().check()
    refused(lambda: Settings(**change).check(), words)

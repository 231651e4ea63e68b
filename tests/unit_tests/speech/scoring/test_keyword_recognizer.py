"""The recognizer understands recordings and the codec's sound, and does not flatter."""

from pathlib import Path

import pytest
import soundfile
import torch

from tests.helpers.speech_corpora import heldout
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.audio import resample
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.keyword_recognizer import KeywordRecognizer
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

RATE = 16_000
DIGITS = "zero one two three four five six seven eight nine".split()


@pytest.fixture(scope="module")
def recordings():
    return list(heldout())


def sound(one):
    return Sound(torch.from_numpy(one.samples), RATE)


@pytest.fixture(scope="module")
def recognizer():
    return KeywordRecognizer(DIGITS)


def word_error_rate(texts, heard):
    counted = list(map(count_errors, texts, heard))
    assert sum(each.words for each in counted) == sum(len(text.split()) for text in texts)
    return sum(each.word_errors for each in counted) / sum(each.words for each in counted)


@pytest.fixture(scope="module")
def heard(recordings, recognizer):
    return [recognizer.transcribe(sound(one)) for one in recordings]


@pytest.mark.long
def test_reads_recordings(recordings, heard):
    references = [one.text for one in recordings]
    assert len({one.speaker for one in recordings}) == 4
    assert word_error_rate(references, heard) < 0.05
    assert word_error_rate(references[1:] + references[:1], heard) > 0.7


def test_speech_is_always_heard(recognizer):
    """Of this clip the recognizer's first pass hears words, and its pass over the word lattice nothing."""
    clip = Path(__file__).with_name("lost_by_the_lattice.flac")
    samples, rate = soundfile.read(clip, dtype="float32")
    assert "eight" in recognizer.transcribe(Sound(torch.from_numpy(samples), rate))


@pytest.mark.long
def test_reads_the_codec_with_noise_on_the_latents(recordings, recognizer):
    codec, generator = build_codec("mel_dct"), torch.Generator().manual_seed(0)
    some = recordings[::3]
    hypotheses = []
    for one in some:
        latents = codec.encode(torch.from_numpy(one.samples))
        latents = latents + 0.3 * torch.randn(latents.shape, generator=generator)
        hypotheses.append(recognizer.transcribe(Sound(codec.decode(latents), codec.sample_rate)))
    assert word_error_rate([one.text for one in some], hypotheses) < 0.1


def test_noise_and_silence_are_not_read(recordings, recognizer):
    generator = torch.Generator().manual_seed(0)
    noise = [0.1 * torch.randn(one.samples.shape, generator=generator) for one in recordings[:8]]
    hypotheses = [recognizer.transcribe(Sound(wave, 16_000)) for wave in noise]
    assert word_error_rate([one.text for one in recordings[:8]], hypotheses) > 0.7
    assert recognizer.transcribe(Sound(torch.zeros(0), 16_000)) == ""


def test_calls_are_independent(recordings, recognizer, heard):
    again = [recognizer.transcribe(sound(one)) for one in recordings[7::-1]]
    assert again == heard[7::-1]


@pytest.mark.long
def test_reads_other_rates(recordings, recognizer):
    some = recordings[::6]
    references = [one.text for one in some]
    waves = [torch.from_numpy(resample(one.samples, RATE, 22_050)) for one in some]
    at_their_rate = [recognizer.transcribe(Sound(wave, 22_050)) for wave in waves]
    assert word_error_rate(references, at_their_rate) < 0.05
    taken_for_16_khz = [recognizer.transcribe(Sound(wave[:48_000], 16_000)) for wave in waves]
    assert word_error_rate(references, taken_for_16_khz) > 0.2


def test_words_outside_the_dictionary_are_refused():
    with pytest.raises(InputError, match="'blorptang' is not in"):
        KeywordRecognizer(["one", "blorptang"])


def test_texts_that_it_cannot_know_are_refused(recognizer):
    recognizer.check_texts(["Eight six.", "nine - ONE, zero!", "8 6", "seven-three", "...", ""])
    for text in ("The cat sat.", "one twenty", "86", "eight 5%", "um one", "acht"):
        with pytest.raises(
            InputError, match="words that the word loop over 10 words .* cannot hear"
        ):
            recognizer.check_texts(["one two", text])
    with pytest.raises(InputError, match="have 2 words .* the first is 'The', .* whisper:FOLDER"):
        recognizer.check_texts(["The cat", "one cat"])

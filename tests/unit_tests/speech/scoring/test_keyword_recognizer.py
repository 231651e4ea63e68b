"""The recognizer understands recordings at any rate and the codec's sound, and does not flatter."""

from pathlib import Path

import pytest
import soundfile
import torch

from tests.helpers.sentences import refused
from tests.helpers.speech_corpora import heldout
from torchtitan.models.dit_tts.speech.audio import resample
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

RATE = 16_000


@pytest.fixture(scope="module")
def recognizer():
    return open_recognizer("words:Zero, one,two,three,four,five,six,seven,eight,nine")


def word_error_rate(recordings, heard):
    counted = [count_errors(one.text, said) for one, said in zip(recordings, heard, strict=True)]
    return sum(each.word_errors for each in counted) / sum(each.words for each in counted)


@pytest.mark.long
def test_reads_recordings_whatever_was_read_before(recognizer):
    recordings = list(heldout())[::2]
    sounds = [Sound(torch.from_numpy(one.samples), RATE) for one in recordings]
    heard = [recognizer.transcribe(sound) for sound in sounds]
    assert word_error_rate(recordings, heard) < 0.05
    assert word_error_rate(recordings[1:] + recordings[:1], heard) > 0.7
    assert [recognizer.transcribe(sound) for sound in sounds[5::-1]] == heard[5::-1]
    some, generator = recordings[::3], torch.Generator().manual_seed(0)
    waves = [torch.from_numpy(resample(one.samples, RATE, 22_050)) for one in some]
    at_their_rate = [recognizer.transcribe(Sound(wave, 22_050)) for wave in waves]
    assert word_error_rate(some, at_their_rate) < 0.05
    codec, decoded, noise = build_codec("mel_dct"), [], []
    for one in some:
        latents = codec.encode(torch.from_numpy(one.samples))
        latents = latents + 0.3 * torch.randn(latents.shape, generator=generator)
        decoded.append(recognizer.transcribe(Sound(codec.decode(latents), codec.sample_rate)))
        sound = Sound(0.1 * torch.randn(one.samples.shape, generator=generator), RATE)
        noise.append(recognizer.transcribe(sound))
    assert word_error_rate(some, decoded) < 0.1 and word_error_rate(some, noise) > 0.7
    for samples in (0, 16_000):
        assert recognizer.transcribe(Sound(torch.zeros(samples), RATE)) == ""
    # Of this clip the first pass hears words, and the pass over the word lattice nothing.
    clip = Path(__file__).with_name("lost_by_the_lattice.flac")
    samples, rate = soundfile.read(clip, dtype="float32")
    assert "eight" in recognizer.transcribe(Sound(torch.from_numpy(samples), rate))


def test_texts_that_it_cannot_know_are_refused(recognizer):
    recognizer.check_texts(["Eight six.", "nine - ONE, zero!", "8 6", "seven-three", "...", ""])
    for text in ("one twenty", "86", "eight 5%", "um one", "acht"):
        words = ("words that the word loop over 10 words", "cannot hear")
        refused(lambda: recognizer.check_texts(["one two", text]), *words)
    words = ("have 2 words", "the first is 'The'", "whisper:FOLDER")
    refused(lambda: recognizer.check_texts(["The cat", "one cat"]), *words)

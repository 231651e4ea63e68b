"""Plug-ins for tests. The recognizer knows an utterance by its length, and writes down what is said in
words, as a perfect recognizer does."""

import numpy as np

SPEC = "tests.helpers.duration_recognizer:factory"
SPEAKER_SPEC = "tests.helpers.duration_recognizer:speaker_factory"

spoken: dict[int, str] = {}
"""length in frames of 40 ms -> the words"""


class DurationRecognizer:
    name = "a recognizer of <b>lengths</b>"

    def check_texts(self, texts, languages=()):
        pass

    def transcribe(self, sound, language=""):
        return spoken.get(round(25 * sound.seconds), "")


def factory(device):
    return DurationRecognizer()


class Speakers:
    """Tells voices apart by how often their sounds cross zero: recordings and their copies do alike, noise does not."""

    name = "zero crossings"

    def embed(self, sounds):
        waves = [sound.waveform for sound in sounds]
        angles = [np.pi / 2 * float((w[1:] * w[:-1] < 0).float().mean()) for w in waves]
        return np.array([(np.cos(angle), np.sin(angle)) for angle in angles], np.float32)


def speaker_factory(device):
    return Speakers()

"""Plug-ins for tests. The recognizer knows an utterance by its length, and writes down what is said in
words, as a perfect recognizer does. The voices of two sounds are as
similar as the reference is long, in seconds."""

SPEC = "tests.helpers.duration_recognizer:factory"
LOUD_SPEC = "tests.helpers.duration_recognizer:loud_factory"
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


class DurationSpeakers:
    name = "lengths of references"

    def similarity(self, sound, reference):
        return reference.seconds


def speaker_factory(device):
    return DurationSpeakers()


class LoudSpeakers:
    """Prefers loud sounds, so a system's noise to recordings."""

    name = "loudness"

    def similarity(self, sound, reference):
        return float(sound.waveform.abs().max()) - 0.1 * reference.seconds


def loud_factory(device):
    return LoudSpeakers()

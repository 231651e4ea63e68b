"""Texts in pieces, in several candidates, and many at once."""

from dataclasses import dataclass, field, replace

import pytest

from tests.helpers.sentences import refused
from titan_tts.speak.generate import Narrator
from titan_tts.speak.request_lists import Request
from titan_tts.speak.utterance import Utterance


@dataclass
class Ears:
    """Hears a text in the loudest candidate only, and only in the language that is spoken."""

    name: str = "ears"
    loudest: dict = field(default_factory=dict)

    def transcribe(self, sound, language=""):
        best = float(sound.waveform.sum()) == self.loudest["value"]
        return "one" if best and language == "de" else "six"


@pytest.fixture
def short(synthesizer):
    """One that says four frames at once."""
    synthesizer.run.config.data.max_frames = 4
    return synthesizer


def test_the_best_candidate_is_chosen(short):
    narrator = Narrator(short, seed=3, batch_size=2, candidates=5, recognizer=Ears())
    utterance = Utterance("one", short.speaker("ann"), {"language": "de"})
    numbered = [replace(utterance, candidate=number) for number in range(5)]
    sums = [float(each.waveform.sum()) for each in short.synthesize(numbered, seed=3)]
    assert len(set(sums)) == 5  # candidates differ
    for best in (4, 1):
        narrator.recognizer.loudest["value"] = sums[best]
        [(_, speech)] = narrator.synthesize([utterance])
        assert (speech.candidate, speech.transcript, speech.errors.word_errors) == (best, "one", 0)
    narrator.recognizer.loudest["value"] = None
    assert dict(narrator.synthesize([utterance]))[0].candidate == 0  # equal ones: the first


def test_candidates_count_in_batches_and_a_first_piece_is_said_alone(short, monkeypatch):
    batches, speak = [], short.speak
    monkeypatch.setattr(short, "speak", lambda r, *a: batches.append(len(r)) or speak(r, *a))
    narrator = Narrator(short, batch_size=5, candidates=2)
    words = ("one two one", "a", "two two two two", "one", "one two")
    pieces = [Utterance(each, short.speaker("ann")) for each in words]
    for low_latency, expected in ((False, [4, 4, 2]), (True, [2, 4, 4])):
        said = list(narrator.stream(pieces, low_latency))  # in order, whatever the lengths
        assert [len(each.latents) for each in said] == short.frames(pieces)
        assert batches == expected
        batches.clear()
    few = Narrator(short, batch_size=1, candidates=2).stream(pieces[:2])
    assert len(list(few)) == 2 and batches == [1] * 4


def test_what_exceeds_a_wav_is_told_before_it_is_said(short, monkeypatch):
    monkeypatch.setattr(type(short), "samples", lambda self, pieces: 2**31)
    monkeypatch.setattr(short, "speak", None)
    request = Request("a", "one", "", {}, {}, where="here")
    for out in ("a.WAV", ""):
        refused(lambda out=out: Narrator(short).write(request, out, "wav"), "4 GiB")

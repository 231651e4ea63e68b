"""Texts in pieces, in several takes, and many at once."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from tests.helpers import served
from titan_tts.speak.narration import Narrator
from titan_tts.speak.synthesizer import Utterance

LONG = "One two one. " * 3 + "Two two one. " * 3


@pytest.fixture
def synthesizer(tmp_path, shards):
    found = served.make_synthesizer(tmp_path, shards)
    found.run.config.data.max_frames = 4
    return found


@dataclass
class Ears:
    """Hears a text in the loudest take only, and only in the language that is spoken."""

    name: str = "ears"
    loudest: dict = field(default_factory=dict)

    def transcribe(self, sound, language=""):
        best = float(sound.waveform.sum()) == self.loudest["value"]
        return "one" if best and language == "de" else "six"


def test_the_best_take_is_chosen(synthesizer):
    narrator = Narrator(synthesizer, seed=3, batch_size=2, takes=5, recognizer=Ears())
    utterance = Utterance("one", synthesizer.speaker("ann"), {"language": "de"})
    numbered = [replace(utterance, take=number) for number in range(5)]
    sums = [float(each.waveform.sum()) for each in synthesizer.synthesize(numbered, seed=3)]
    assert len(set(sums)) == 5  # takes differ
    for best in (4, 1):
        narrator.recognizer.loudest["value"] = sums[best]
        [take] = narrator.say([utterance])
        assert (take.number, take.heard, take.errors.word_errors) == (best, "one", 0)
    narrator.recognizer.loudest["value"] = None
    assert narrator.say([utterance])[0].number == 0  # equal ones: the first
    assert narrator.wall_seconds > 0


def test_alone_as_among_many(synthesizer):
    """A text's speech is the same by itself, in a stream, and beside others."""
    texts = [LONG, "One.", "Two two two two. " * 4]
    voice = synthesizer.speaker("bob")
    narrator = Narrator(synthesizer, batch_size=3)
    pieces = [synthesizer.pieces(Utterance(text, voice)) for text in texts]
    assert [len(each) > 1 for each in pieces] == [True, False, True]
    many = dict(narrator.say_all(pieces))
    assert sorted(many) == [0, 1, 2]
    for place, each in enumerate(pieces):
        alone = list(narrator.stream(each))
        assert len(alone) == len(each)
        sound = torch.cat(list(narrator.waveforms(alone, len(each))))
        together = torch.cat(list(narrator.waveforms(many[place], len(each))))
        torch.testing.assert_close(together, sound, atol=1e-5, rtol=0)
        assert len(sound) == synthesizer.samples(each)
    assert list(narrator.say_all([])) == []


def test_speech_begins_soon(synthesizer, monkeypatch):
    narrator = Narrator(synthesizer, batch_size=4)
    utterance = Utterance("One two one two. Two. " * 8, synthesizer.speaker("ann"))
    pieces = synthesizer.pieces(utterance, soon=True)
    assert pieces[0].text == "One two one two." and len(pieces[1].text) > len(pieces[0].text)
    batches = []
    speak = synthesizer.speak
    monkeypatch.setattr(synthesizer, "speak", lambda r, *more: batches.append(r) or speak(r, *more))
    stream = narrator.stream(pieces, soon=True)
    next(stream)
    assert [[each.text for each in batch] for batch in batches] == [[pieces[0].text]]
    assert len(list(stream)) == len(pieces) - 1

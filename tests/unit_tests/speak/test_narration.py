"""Texts in pieces, in several takes, and many at once."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from tests.helpers import served
from tests.helpers.row_model import CHANNELS
from tests.helpers.sampled_run import HOP
from titan_tts.speak import synthesizer as synthesizer_module
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


@pytest.mark.parametrize("continues", [False, True])
def test_alone_as_among_many(synthesizer, continues):
    """A text's speech is the same by itself, in a stream, and beside others."""
    texts = [LONG, "One.", "Two two two two. " * 4]
    voice = synthesizer.speaker("bob")
    narrator = Narrator(synthesizer, batch_size=3, continues=continues)
    pieces = [narrator.pieces(Utterance(text, voice)) for text in texts]
    assert [len(each) > 1 for each in pieces] == [True, False, True]
    many = dict(narrator.say_all(pieces))
    assert sorted(many) == [0, 1, 2]
    for place, each in enumerate(pieces):
        alone = list(narrator.stream(each))
        assert [take.speech.text for take in alone] == [piece.text for piece in each]
        sound = torch.cat(list(narrator.waveforms(alone, len(each))))
        together = torch.cat(list(narrator.waveforms(many[place], len(each))))
        torch.testing.assert_close(together, sound, atol=1e-5, rtol=0)
        assert len(sound) == synthesizer.samples(each, pauses=not continues)
    assert list(narrator.say_all([])) == []


def test_a_piece_continues_the_one_before(synthesizer, monkeypatch):
    """Its text and latents stand before it, the length is theirs together, and only it is returned."""
    asked = []

    def generated(model, tokenizer, objective, requests, *more):
        asked.extend(requests)
        return [torch.arange(each.frames)[:, None].expand(-1, CHANNELS) + 0.0 for each in requests]

    monkeypatch.setattr(synthesizer_module, "generate_latents", generated)
    narrator = Narrator(synthesizer, continues=True)
    first, second, *_ = narrator.pieces(Utterance(LONG, synthesizer.speaker("ann")))
    limit = synthesizer.run.config.data.max_frames // 2
    frames = synthesizer.frames([first, second])
    assert max(frames) <= limit
    one, two = narrator.stream([first, second])
    assert asked[0].prefix is None and asked[0].whole_text == first.text
    assert asked[1].whole_text == f"{first.text} {second.text}"
    assert torch.equal(asked[1].prefix, one.speech.latents)
    assert [request.frames for request in asked] == [frames[0], sum(frames)]
    assert asked[1].metadata["target_duration"] == sum(frames) / 25
    assert two.speech.latents[0, 0] == frames[0] and len(two.speech.latents) == frames[1]
    # Decoded with what is before it: it begins where that ends, and is faded into its last samples.
    assert two.speech.waveform[0] == pytest.approx(frames[0] / 100)
    assert two.speech.lead.tolist() == pytest.approx([(frames[0] - 1) / 100] * 2)
    sounds = list(narrator.waveforms([one, two], 2))
    assert len(torch.cat(sounds)) == HOP * sum(frames)
    assert torch.cat(sounds).diff().max() <= 0.0101


def test_speech_begins_soon(synthesizer, monkeypatch):
    narrator = Narrator(synthesizer, batch_size=4)
    utterance = Utterance("One two one two. Two. " * 8, synthesizer.speaker("ann"))
    pieces = narrator.pieces(utterance, soon=True)
    assert pieces[0].text == "One two one two." and len(pieces[1].text) > len(pieces[0].text)
    batches = []
    speak = synthesizer.speak
    monkeypatch.setattr(synthesizer, "speak", lambda r, *more: batches.append(r) or speak(r, *more))
    stream = narrator.stream(pieces, soon=True)
    next(stream)
    assert [[each.text for each in batch] for batch in batches] == [[pieces[0].text]]
    assert len(list(stream)) == len(pieces) - 1

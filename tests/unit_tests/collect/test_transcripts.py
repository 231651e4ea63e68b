"""Two texts of a segment: paired, compared by words, and told how sure they are."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.sentences import refused
from titan_tts.collect import analyze
from titan_tts.collect.analyze import Transcriber, Transcript, agreement
from titan_tts.collect.settings import Settings
from torchtitan.models.dit_tts.speech.scoring.interface import Sound


def sounds(*seconds):
    return [Sound(torch.zeros(int(each * 100)), 100) for each in seconds]


def transcriber(monkeypatch, batch, verbatim="", language="en"):
    """The first recognizer hears several sounds at once, the second each alone."""
    check = {"check_texts": lambda texts, languages=(): None}
    alone = SimpleNamespace(
        name="b", transcribe=lambda sound, language: f" {sound.seconds} {language}.\n", **check
    )
    made = {"clean": SimpleNamespace(name="a", transcribe_batch=batch, **check), "verbatim": alone}
    monkeypatch.setattr(analyze, "open_recognizer", lambda spec, device: made[spec])
    monkeypatch.setattr(analyze, "_BATCH", 2)
    settings = Settings(recognizer="clean", verbatim_recognizer=verbatim, language=language)
    return Transcriber(settings, "cpu")


def test_each_text_is_its_segments(monkeypatch):
    sizes = []

    def batch(sounds, language):
        sizes.append(len(sounds))
        return [(f"{sound.seconds} {language} uh", "en") for sound in sounds]

    found = transcriber(monkeypatch, batch, "verbatim", "eng").transcribe(sounds(3, 1, 2))
    for seconds, each in zip((3.0, 1.0, 2.0), found, strict=True):
        texts = {"text": f"{seconds} eng uh", "text_verbatim": f"{seconds} eng."}
        assert each == Transcript(**texts, agreement=1.0, language="en")
    assert sizes == [2, 1]


def test_one_recognizer_agrees_with_nothing_and_tells_how_sure_it_is(monkeypatch):
    sure = iter([[("one", "de", 0.9), ("two two " * 30, "", 0.9)], [("three", "en")]])
    made = transcriber(monkeypatch, lambda sounds, language: next(sure), language="")
    found = made.transcribe(sounds(1, 2, 3))
    assert {(each.text_verbatim, each.agreement) for each in found} == {(None, None)}
    assert [each.confidence for each in found] == [0.9, 0.0, None]
    assert [each.language for each in found] == ["de", "", "en"] and made.transcribe([]) == []
    lost = transcriber(monkeypatch, lambda sounds, language: [("a", "en")])
    refused(lambda: lost.transcribe(sounds(1, 2)), "'a' returned 1 texts for 2 sounds")
    plain = transcriber(monkeypatch, lambda sounds, language: ["one", "two"])
    refused(
        lambda: plain.transcribe(sounds(1, 2)), "returned 'one', but", "return (words, language)"
    )


@pytest.mark.parametrize(
    ("text", "other", "language", "wanted"),
    [
        ("One two, three four!", "one TWO three four", "en", 1.0),
        ("one two three four", "one two three", "en", 0.75),
        ("one two three", "one two three four", "en", 0.75),
        ("five cats sleep", "um, five cats sleep", "en", 1.0),  # hesitation is no word
        ("um fünf Uhr", "fünf Uhr", "de", 2 / 3),  # which there it is
        ("extraordinary tests", "a b c d", "en", 0.0),  # the longer one has more words, not letters
        ("a cat", "", "en", 0.0),
        ("", "...", "en", 0.0),
        ("你好世界", "你好世间", "zh", 0.75),
        ("你好世界", "你好世间", "", 0.75),
    ],
)
def test_agreement(text, other, language, wanted):
    assert agreement(text, other, language) == pytest.approx(wanted)

"""Two texts of a segment: paired by the segment, compared by words."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.sentences import refused
from titan_tts.collect import transcripts
from titan_tts.collect.settings import Settings
from titan_tts.collect.transcripts import Transcriber, Transcript, agreement
from torchtitan.models.dit_tts.speech.scoring.interface import Sound


def sounds(*seconds):
    return {f"of {each}": Sound(torch.zeros(int(each * 100)), 100) for each in seconds}


def said(text, verbatim, agreement, language):
    return Transcript(text=text, text_verbatim=verbatim, agreement=agreement, language=language)


def recognizer(name, hear, batch=None):
    made = SimpleNamespace(name=name, transcribe=hear, check_texts=lambda texts, languages=(): None)
    if batch:
        made.transcribe_batch = batch
    return made


def transcriber(monkeypatch, made, verbatim="", language="en", batch_size=2):
    monkeypatch.setattr(transcripts, "open_recognizer", lambda spec, device: made[spec])
    monkeypatch.setattr(transcripts, "_BATCH", batch_size)
    settings = Settings(recognizer="clean", verbatim_recognizer=verbatim, language=language)
    return Transcriber(settings, "cpu")


def test_each_text_is_its_segments(monkeypatch):
    sizes = []

    def batch(sounds, language):
        sizes.append(len(sounds))
        return [(f"{sound.seconds} seconds uh", language + "x") for sound in sounds]

    clean = recognizer("a", lambda sound, language: f" {sound.seconds} seconds. ")
    made = {"clean": clean, "verbatim": recognizer("b", None, batch)}
    found = transcriber(monkeypatch, made, "verbatim").transcribe(sounds(3, 1, 2))
    for seconds in (1, 2, 3):
        text = f"{seconds}.0 seconds"
        assert found[f"of {seconds}"] == said(f"{text}.", f"{text} uh", 1.0, "en")
    assert sizes == [2, 1]


def test_one_recognizer_agrees_with_nothing_and_tells_how_sure_it_is(monkeypatch):
    batch = lambda sounds, language: [("hallo", "de")] * len(sounds)  # noqa: E731
    made = {"clean": recognizer("a", None, batch)}
    found = transcriber(monkeypatch, made, language="").transcribe(sounds(1))
    assert found == {"of 1": said("hallo", None, None, "de")}
    assert transcriber(monkeypatch, made).transcribe({}) == {}
    sure = [("one", "en", 0.9), ("two two " * 30, "en", 0.9), ("three", "en")]
    made = {"clean": recognizer("a", None, lambda sounds, language: sure)}
    heard = transcriber(monkeypatch, made, batch_size=3).transcribe(sounds(1, 2, 3))
    assert [each.confidence for each in heard.values()] == [0.9, 0.0, None]


def test_texts_that_cannot_be_paired_are_refused(monkeypatch):
    made = {"clean": recognizer("lost one", None, lambda sounds, language: [("a", "en")])}
    heard = transcriber(monkeypatch, made)
    words = "'lost one' returned 1 texts for 2 segments"
    refused(lambda: heard.transcribe(sounds(1, 2)), words)


@pytest.mark.parametrize(
    ("text", "other", "wanted"),
    [
        ("One two, three four!", "one TWO three four", 1.0),
        ("one two three four", "one two three", 0.75),
        ("one two three", "one two three four", 0.75),
        ("five cats sleep", "um, five cats sleep", 1.0),  # hesitation is no word
        ("alpha beta", "gamma delta epsilon zeta", 0.0),
        ("extraordinary tests", "a b c d", 0.0),  # the longer one has more words, not letters
        ("a cat", "", 0.0),
        ("", "a cat", 0.0),
        ("", "...", 0.0),
    ],
)
def test_agreement(text, other, wanted):
    assert agreement(text, other, "en") == pytest.approx(wanted)


def test_agreement_where_words_have_no_blanks():
    assert agreement("你好世界", "你好世间", "zh") == agreement("你好世界", "你好世间") == 0.75

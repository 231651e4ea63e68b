"""Which plug-in is asked what, and how scores of utterances become one."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.scores import Scorers, corpus_scores, score


class Scorer:
    """Answers each of the three questions."""

    name = "all"
    spelling = {"colour": "color"}

    def __init__(self, *texts):
        self.texts, self.languages = list(texts), []

    def transcribe(self, sound, language=""):
        self.languages.append(language)
        return self.texts.pop(0)

    def embed(self, sounds):
        return np.array([sound.waveform[:2].numpy() for sound in sounds])

    def score(self, sound):
        return float(sound.waveform[1])


def sound(*values):
    return Sound(torch.tensor(values), 2)


def test_scores_of_an_utterance():
    recognizer = Scorer("The color red", "um rot")
    scorers = Scorers(recognizer, recognizer, recognizer)
    found = score(sound(4.0, 3.0, 0.0), "the colour", scorers, sound(0.0, 0.1), "en")
    assert (found.heard, found.errors.word_errors, found.errors.words) == ("The color red", 1, 2)
    assert found.speaker_similarity == pytest.approx(0.6)
    assert (found.opinion, found.seconds) == (3.0, 1.5)
    laughing = Scorers(Scorer("a b"), added=AddedTokens(["(laugh)"]))
    assert score(sound(0.75), "a (laugh) b", laughing).errors.word_errors == 0
    without = score(sound(0.75, 3.0), "rot", scorers, None, "de")
    assert without.speaker_similarity is None and recognizer.languages == ["en", "de"]
    assert without.errors.word_errors == 1  # "um", which in English is no word
    unknown = score(sound(0.75), "rot", Scorers(opinion=SimpleNamespace(score=lambda _: math.nan)))
    assert unknown.opinion is None
    nothing = score(sound(0.0), "rot", Scorers(), sound(0.0))
    assert nothing.heard is nothing.errors is nothing.speaker_similarity is nothing.opinion is None


def test_rates_are_over_all_words_and_means_over_what_there_is():
    scorers = Scorers(*[Scorer("a b c d e f g i", "x", "")] * 3)
    scores = [
        score(sound(0.0, 3.0), "a b c d e f g h", scorers, sound(0.0, 0.5)),
        score(sound(0.5, 4.0), "y", scorers),
        score(sound(0.0, 2.0), "...", scorers, sound(0.0, 0.0)),  # it hears no voice
    ]
    assert corpus_scores(scores) == {
        "wer": pytest.approx(2 / 9),
        "cer": pytest.approx(2 / 16),
        "speaker_similarity": pytest.approx(0.5),
        "opinion": 3.0,
    }
    nothing = dict.fromkeys(("wer", "cer", "speaker_similarity", "opinion"))
    assert corpus_scores([]) == corpus_scores([score(sound(0.0), "a", Scorers())]) == nothing


def test_samples_of_a_sound():
    broken = torch.tensor([0.5, float("nan"), float("inf"), -float("inf"), 7.0, -7.0])
    assert Sound(broken, 8000).samples(8000).tolist() == [0.5, 0, 0, 0, 1, -1]
    tone = torch.sin(torch.arange(8000) * 0.2)
    assert Sound(tone.double(), 8000).samples(16_000).shape == (16_000,)
    assert Sound(tone[:0], 8000).samples(16_000).shape == (0,)

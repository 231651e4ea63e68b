"""Specs of plug-ins: the shipped, a user's own, and what is refused in a sentence."""

import sys

import pytest
import torch

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import (
    open_opinion_predictor,
    open_recognizer,
    open_speaker_scorer,
)

OWN = """
class Both:
    name = "mine"
    def __init__(self, device): self.device = device
    def transcribe(self, sound, language=""): return "yes"
    def check_texts(self, texts, languages=()): pass
    def similarity(self, sound, reference): return 0.5
    def score(self, sound): return 2.0
class Half:
    name = "half"
    def __init__(self, device): pass
    def transcribe(self, sound, language=""): return "yes"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Of the folder in which the command is given."""
    (tmp_path / "my_referees.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield "my_referees"
    sys.modules.pop("my_referees", None)


def test_a_users_own(module):
    made = open_recognizer(f"{module}:Both", "cuda:1")
    assert made.device == "cuda:1" and made.transcribe(None) == "yes"
    assert open_speaker_scorer(f"{module}:Both").similarity(None, None) == 0.5
    assert open_opinion_predictor(f"{module}:Both").score(None) == 2.0
    with pytest.raises(InputError, match="recognizer of 'my_referees:Half' lacks check_texts"):
        open_recognizer(f"{module}:Half")
    with pytest.raises(InputError, match="'my_referees:None_' cannot be imported"):
        open_recognizer(f"{module}:None_")


@pytest.mark.parametrize(
    "opens, spec, message",
    [
        (open_recognizer, "", "'' is no recognizer; take words:zero"),
        (open_recognizer, "whisper", "is no recognizer; take words:.*whisper:"),
        (open_recognizer, "whisper:", "is no recognizer"),
        (open_recognizer, "a.b", "is no recognizer"),
        (open_recognizer, "no_such_package.x:y", "cannot be imported"),
        (open_recognizer, "words:one,,two", "word '' is not in"),
        (open_recognizer, "words:one,blorptang", "'blorptang' is not in"),
        (open_recognizer, "words:read(2)", r"'read\(2\)' is not in"),
        (open_speaker_scorer, "xvector", "is no speaker scorer; take own, xvector:"),
        (open_speaker_scorer, "own", "has no speaker encoder of its own"),
        (open_opinion_predictor, "utmos", "is no opinion predictor; take dnsmos"),
    ],
)
def test_what_is_refused(opens, spec, message):
    with pytest.raises(InputError, match=message):
        opens(spec)


@pytest.mark.parametrize(
    "opens, spec, missing, extra",
    [
        (open_recognizer, "words:one", "pocketsphinx", "speech"),
        (open_recognizer, "whisper:tiny", "transformers", "pretrained"),
        (open_recognizer, "faster-whisper:tiny", "faster_whisper", "faster-whisper"),
        (open_speaker_scorer, "xvector:a/b", "transformers", "pretrained"),
        (open_opinion_predictor, "dnsmos", "speechmos", "opinion"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(opens, spec, missing, extra, monkeypatch):
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "torchtitan.models.dit_tts.errors.find_spec", lambda n: None if n == missing else found(n)
    )
    with pytest.raises(InputError, match=rf"titan-tts\[{extra}\]'"):
        opens(spec)


def test_words_are_taken_in_any_case():
    recognizer = open_recognizer("words:Eight, six")
    recognizer.check_texts(["Eight six."])
    assert recognizer.transcribe(Sound(torch.zeros(0), 16_000)) == ""

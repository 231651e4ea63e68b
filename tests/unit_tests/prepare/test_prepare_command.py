"""The command: its options, what it prints, and what it needs installed."""

import json
import os

import pytest
import soundfile

from tests.helpers.speech_corpora import RATE, tone
from titan_tts import cli
from titan_tts.prepare import prepare_command
from titan_tts.prepare.settings import AudioSettings, Options
from torchtitan.models.dit_tts import errors
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.errors import InputError


def test_options_on_the_command_line(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(prepare_command, "run", lambda options: given.append(options) or 0)
    assert cli.main(["prepare", "in", "out"]) == 0
    more = ["--loudness", "off", "--max-silence", "0.5", "--seed", "3"]
    assert cli.main(["prepare", "in", "out", *more]) == 0
    audio = AudioSettings(None, 0.5)
    assert given == [Options("in", "out"), Options("in", "out", audio=audio, seed=3)]
    assert cli.main(["prepare", "in", "out", "--loudness=loud"]) == 2
    assert "--loudness = 'loud', but it must be a number or off" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, value",
    [("references", 0), ("workers", -1), ("heldout_fraction", 2), ("max_corrupt_fraction", -0.1)],
)
def test_numbers_out_of_range(name, value):
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} = {value}, but"):
        Options("in", "out", **{name: value}).check()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"speaker_pattern": "(a"}, r"--speaker-pattern = '\(a' is no regular expression \("),
        ({"speaker_pattern": "^[^_]+_"}, "--speaker-pattern = .* has no group; put parentheses"),
        (
            {"heldout_by": "speaker"},
            "--heldout-by speaker holds nobody out, as --heldout-fraction is",
        ),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(InputError, match=message):
        Options("in", "out", **options).check()
    Options("in", "out", speaker_pattern="^(a)", heldout_by="speaker", heldout_fraction=0.1).check()


def test_what_changes_the_split_changes_the_shards():
    settings = Options("in", "out", speaker_pattern="(a)", heldout_by="speaker").of_shards()
    assert settings["speaker_pattern"] == "(a)" and settings["heldout_by"] == "speaker"


@pytest.mark.parametrize("name", AudioSettings.__dataclass_fields__)
def test_numbers_of_the_audio_are_finite(name):
    for value in (float("inf"), float("nan"), -71):
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} = "):
            Options("in", "out", audio=AudioSettings(**{name: value})).check()
    Options("in", "out", audio=AudioSettings(min_seconds=1, max_silence=0)).check()


def test_what_the_command_prints(tmp_path, capsys, monkeypatch):
    soundfile.write(tmp_path / "a.wav", tone(1), RATE)
    row = {"audio": "a.wav", "text": "x", "speaker": "ann"}
    (tmp_path / "list.jsonl").write_text(json.dumps(row))
    options = Options(str(tmp_path / "list.jsonl"), str(tmp_path / "o ut"), workers=1, device="cpu")
    with monkeypatch.context() as patched, pytest.raises(InputError, match=r"titan-tts\[speech\]"):
        patched.setattr(errors, "find_spec", lambda name: None if name == "av" else name)
        prepare_command.run(options)
    assert sorted(os.listdir(tmp_path)) == ["a.wav", "list.jsonl"]
    assert prepare_command.run(options) == 0
    first = capsys.readouterr().out
    assert "codec mel_dct: 16000 Hz" in first and "train: samples 1, " in first
    assert f"titan-tts data inspect '{tmp_path}/o ut/train'" in first
    assert f"titan-tts train one_gpu --data.path '{tmp_path}/o ut/train'" in first
    assert prepare_command.run(options) == 0
    assert "was complete already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "codec, text, config",
    [
        ("facebook/dacvae-watermarked", {}, "800m"),
        ("mel_dct", {}, "one_gpu"),
        ("mel_dct", {"encode_text": "some/encoder"}, "800m"),
        ("/my weights.pth", {}, "800m"),
        (
            "mel_dct",
            {"encode_text": "e", "text_dtype": "float32", "text_feature_dtype": "float16"},
            "800m",
        ),
    ],
)
def test_the_suggested_command_has_codec_and_features_of_the_data(codec, text, config):
    options = Options("in", "out", codec=codec, **text)
    name, *keys = prepare_command._config_for(options)
    assert name == config
    suggested = load_config([f"--job.config_file={find_config(name)}", *keys])
    assert suggested.sampling.codec == codec
    encoder = suggested.encoder
    assert encoder.cache_features == bool(text)
    if text:
        assert encoder.model == options.encode_text
        assert (encoder.dtype, encoder.cache_dtype) == (
            options.text_dtype,
            options.text_feature_dtype,
        )

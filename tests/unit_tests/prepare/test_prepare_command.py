"""The command: its options, what it prints, and what it needs installed."""

import os
from dataclasses import replace

import pytest

from tests.helpers.speech_corpora import write_tones
from titan_tts import cli
from titan_tts.prepare import pipeline, prepare_command
from titan_tts.prepare.encode import Chunk
from titan_tts.prepare.pipeline import lines, summarize
from titan_tts.prepare.settings import AudioSettings, Options
from torchtitan.models.dit_tts import errors
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.config.shipped import find_config
from torchtitan.models.dit_tts.errors import InputError


def test_defaults():
    """They decide the bytes of shards: another one makes every earlier output another's."""
    audio = {"loudness": -16.0, "max_silence": 0.25, "max_clipped": None}
    audio |= dict.fromkeys(("min_seconds", "max_seconds"))
    audio |= dict.fromkeys(("min_chars_per_second", "max_chars_per_second"))
    shards = {"format": "auto", "codec": "mel_dct", "samples_per_shard": 1000, "references": 1}
    shards |= {"max_reference_frames": 384, "seed": 0, "chunk_items": 64, "audio": audio}
    shards |= {"heldout_fraction": 0.0, "heldout_by": "utterance"}
    names = ("text_column", "speaker_column", "speaker_pattern", "speaker", "language")
    options = Options("in", "out")
    assert options.of_shards() == shards | dict.fromkeys(names, "")
    assert (options.on_error, options.max_corrupt_fraction) == ("raise", 0.01)


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


MISTAKES = [
    ({"references": -1}, "--references = -1, but"),
    ({"heldout_fraction": 2}, "--heldout-fraction = 2, but it must be between 0 and 1 and"),
    ({"chunk_items": 0}, "--chunk-items = 0, but it must be at least 1 and finite"),
    ({"max_reference_frames": 0}, "--max-reference-frames = 0, but it must be at least 1"),
    ({"audio": AudioSettings(loudness=0.5)}, "--loudness = 0.5, but it must be between -70 and 0"),
    ({"audio": AudioSettings(max_silence=float("nan"))}, "--max-silence = nan, but"),
    ({"audio": AudioSettings(max_seconds=float("inf"))}, "--max-seconds = inf, but"),
    ({"speaker_pattern": "(a"}, r"--speaker-pattern = '\(a' is not a regular expression"),
    ({"speaker_pattern": "^[^_]+_"}, "--speaker-pattern = .* with parentheses around"),
    (
        {"language": "german"},
        "--language = 'german' is not a language code; give one such as en, de",
    ),
]


@pytest.mark.parametrize("options, message", MISTAKES)
def test_options_that_cannot_work(options, message):
    with pytest.raises(InputError, match=message):
        Options("in", "out", **options).check()
    for language in ("", "en", "cmn", "en-us", "en_US", "zh-Hant", "de-CH-1996"):
        Options("in", "out", language=language).check()


def test_letters_that_the_encoder_to_come_loses_are_refused_before_encoding(
    tmp_path, monkeypatch, capsys
):
    source = write_tones(tmp_path / "in", "ab", 1.0, text="東京 one", speaker="ann")
    arguments = ["prepare", str(source), str(tmp_path / "out"), "--encoder"]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "open_engine", None)  # nothing is encoded
        for encoder in ("phones:en-us", "phones:ja"):
            assert cli.main([*arguments, encoder]) == 2
            error = capsys.readouterr().err
            assert f"--encoder = '{encoder}', but in 2 of 2 texts" in error
            assert "'東', '京'; a); set it to 'chars'" in error
    for encoder in ("phones:cmn", "chars"):  # a change of it makes no output another's
        assert cli.main([*arguments, encoder]) == 0


def test_what_the_command_prints(tmp_path, capsys, monkeypatch):
    source = write_tones(tmp_path, "a", 1.0, speaker="ann")
    options = Options(str(source), str(tmp_path / "o ut"), workers=1, device="cpu")
    with monkeypatch.context() as patched, pytest.raises(InputError, match=r"titan-tts\[speech\]"):
        patched.setattr(errors, "find_spec", lambda name: None if name == "av" else name)
        prepare_command.run(options)
    assert sorted(os.listdir(tmp_path)) == ["a.wav", "list.jsonl"]

    def printed(**change):
        assert prepare_command.run(replace(options, **change)) == 0
        out, error = capsys.readouterr()
        return out + error

    first = printed()
    for said in (
        "train: samples 1, 0.0 minutes, shards 1",
        f"titan-tts train small --data.path '{tmp_path}/o ut/train'",
        f"titan-tts finetune MODEL {source} TUNED\n",
    ):
        assert said in first
    assert "was complete already" in printed()
    tests = printed(output=str(tmp_path / "test"), heldout_fraction=1.0)
    assert "heldout: samples 1" in tests and "train" not in tests
    assert f"titan-tts evaluate RUN --test {tmp_path}/test\n" in tests
    # With a held-out one, alone and in finetune.
    write_tones(tmp_path, "ab", speaker="ann")
    source.write_text(source.read_text().replace("}", ', "split": "test"}', 1))
    alone = printed(output=f"{tmp_path}/out")
    assert f"titan-tts finetune MODEL {tmp_path}/out TUNED\n" in alone
    assert "only 1 recordings are held out" in alone
    monkeypatch.setenv("TITAN_TTS_OF_FINETUNE", "1")
    inside = printed(output=f"{tmp_path}/out")
    assert "train: samples 1" in inside and "titan-tts" not in inside
    assert "held out" not in inside  # finetune has chosen


def test_figures_in_words():
    """Two shards of a split; problems, of which 20 are kept, and 50 names; figures of both splits together."""
    shard = {"samples": 30, "frames": 90_000, "without_reference": 1}
    shards = {"train/a.tar": shard, "train/b.tar": shard | {"without_reference": 2}}
    shards["heldout/a.tar"] = {"samples": 40, "frames": 2250, "without_reference": 0}
    total = Chunk({}, {"empty_text": 24}, [[f"k{number}", "bad"] for number in range(21)])
    for seconds, names in ((1800.0, list("abc")), (2520.0, [f"m{n}" for n in range(60)])):
        lost = {"dropped_seconds": {"too_long": seconds}, "dropped_names": {"too_long": names}}
        total.add(Chunk({}, {"too_long": 1}, **lost))
    total.dropped["too_long"] = 63
    said = "\n".join(lines(summarize(shards, 25.0, 7, total)))
    for each in (
        "train: samples 60, 2.0 hours, shards 2\n",
        "train samples without a reference, as --references is 0 or their speaker has no other recording: 3 (5.0%)",
        "heldout: samples 40, 1.5 minutes, shards 1\nspeakers: 7\n",
        "left out: 87 of 187 recordings, 72.0 of 193.5 minutes (37.2%)\n  empty_text: 24 (",
        "  too_long: 63, 72.0 minutes (above --max-seconds): a, b, c, m0, m1, ",
        ", m45, m46, ...\n  37% of the speech is too long: cut it at pauses",
        "\nthe first undecodable recordings:\n  k0: bad\n",
    ):
        assert each in said
    assert said.endswith("k19: bad")


@pytest.mark.parametrize(
    "codec, hours, config, captions, limits",
    [
        ("mel_dct", 10.0, "one_gpu", False, (0, 0.1)),
        ("mel_dct", 9.9, "small", True, (256, 0.5)),
        ("/my weights.pth", 10.0, "800m", False, (0, 0.1)),
    ],
)
def test_the_suggested_command_is_for_the_data(codec, hours, config, captions, limits):
    options = Options("in", "out", codec=codec, captions=captions)
    name, *keys = prepare_command._config_for(options, hours)
    suggested = load_config([f"--job.config_file={find_config(name)}", *keys])
    assert (name, suggested.sampling.codec) == (config, codec)
    assert (suggested.data.max_caption_tokens, suggested.objective.speaker_dropout) == limits

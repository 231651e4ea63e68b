"""`titan-tts generate` of one text: what it asks of the model, and what it refuses."""

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from tests.helpers.row_model import CHANNELS
from tests.helpers.sampled_run import HOP, Echo, shards  # noqa: F401
from tests.helpers.sentences import refused
from titan_tts.cli import main
from titan_tts.speak.generate import checked_conditions
from titan_tts.speak.generate_command import Options, find_requests
from titan_tts.speak.sampling_options import chosen_config
from titan_tts.speak.utterance import check_text
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.text.durations import LinearDurationModel
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary

SPEAKING = UnitTokenizer(
    make_vocabulary(
        "chars",
        "one two",
        ["speaker", "language", "duration"],
        {"speaker": [f"s{number:02d}" for number in range(30)], "language": ["de", "en=gb"]},
        max_seconds=9,
    )
)


def test_options_reach_the_sampler(generate, shards, monkeypatch, capsys):  # noqa: F811
    ramp = torch.linspace(-50, 50, 31)[:, None].expand(-1, CHANNELS)

    def sample(model, tokenizer, objective, requests, *given):
        generate.asked.append((requests, *given[:2]))
        return [ramp]

    monkeypatch.setattr("titan_tts.speak.synthesizer.generate_latents", sample)
    said = ["--text=one", "--out=new/said.wav", "--speaker=bob", "--seconds=1.23", "--seed=6"]
    generate.loaded.config.data.path = "gone"
    of = [f"--data={shards}", "--step=7", "--weights=raw", "--encoder=t5", "--codec=c.pth"]
    of += ["--dtype=bfloat16", "--text-scale=0", "--speaker-scale=5", "--sampling-steps=9"]
    assert generate(*said, *of) == 0
    (run, given), codec = generate.loads
    assert (run.folder, run.step, run.weights) == (Path("run"), 7, "raw")
    assert given == {"encoder": "t5", "dtype": "bfloat16"} and codec == ("c.pth", "cpu")
    assert "1.24 s (by --seconds) from step 7 (raw)\n" in capsys.readouterr().out
    [([request], sampling, seed)] = generate.asked
    expected = Sampling(steps=9, text_scale=0.0, speaker_scale=5.0, min_t=0.25, codec="c.pth")
    assert (sampling, seed, request.text, request.frames) == (expected, 6, "one", 31)
    # Sample 3 has the longest of bob's references; it is cut to what the run takes.
    assert request.reference.shape == (6, CHANNELS) and (request.reference == 13).all()
    assert request.metadata == {"speaker": "bob", "target_duration": 31 / 25}
    wav, rate = soundfile.read("new/said.wav")
    assert rate == 100 and len(wav) == 31 * HOP
    assert np.abs(wav - np.repeat(np.linspace(-0.5, 0.5, 31), HOP)).max() < 1e-4


def test_length_is_estimated(generate, tmp_path, monkeypatch, capsys):
    """By the run's own fit, without training data; of all of a reference whose text is known."""
    weights = np.zeros(257)
    weights[ord("o")] = 5
    fit = LinearDurationModel(weights, {"ann": 3.0})
    monkeypatch.setattr("titan_tts.speak.speech_data.stored_durations", lambda folder: fit)
    treated = []

    def encode(path, codec, settings, limit):
        treated.append((settings.loudness, limit))
        return torch.zeros(min(limit, 100), CHANNELS)

    def frames(*arguments):
        assert generate("--text=too", "--out=said.wav", *arguments) == 0
        return generate.asked[-1][0][0].frames

    assert frames("--speaker=ann") == 30 and frames("--speaker=ann", "--duration-scale=0.5") == 15
    monkeypatch.setattr("titan_tts.speak.synthesizer.encode_reference", encode)
    generate.loaded.config.data.path = "gone"
    (tmp_path / "voice.wav").touch()
    capsys.readouterr()
    assert frames("--reference=voice.wav") == 10
    assert "0.40 s (by the fit on the training data)" in capsys.readouterr().out
    generate.loaded.config.data.max_frames = 770
    assert frames("--seconds=30.8") == 770 and "warning" not in capsys.readouterr().err
    assert frames("--seconds=30.9") == round(30.9 * 25)
    warned = "--seconds = 30.9, but the model was trained on at most 30.8 s"
    assert warned in capsys.readouterr().err
    assert frames("--seconds=0.01") == 1
    known = ["--reference=voice.wav", "--reference-text=oooooooooo"]
    assert frames(*known) == round(10 * 2 ** (100 / 150))
    assert generate.asked[-1][0][0].reference.shape == (6, CHANNELS)
    # Of a text that is not known no more is encoded than the model takes.
    assert treated == [(-16.0, 6), (-16.0, 15_000)]


MISTAKES = {
    "--text= ": "--text is empty",
    "--text=one --text-file=a_file": "give one of --text",
    "--text-file=nothing": "nothing cannot be read",
    "--text-list=a_file --out=new": "a_file: is empty",
    "--text=one --seconds=600.1": "seconds = 600.1, but it must be above 0 and at most 600",
    "--text=one --seconds=0": "seconds = 0.0, but",
    "--text=one --batch-size=0": "--batch-size = 0, but",
    "--text=one --sampling-steps=0": "[sampling] steps = 0, but",
    "--text=one --out=said.doc": "must end with one of .wav, .flac",
    "--text-list=a_file --out=new --format=pcm": "another --format than pcm",
    "--text=one --out=a.wav --format=flac": "a file's name sets its format",
    "--text-file=b.wav": "b.wav cannot be read",
    "--text=one --reference=./a.wav --out=a.wav": "that is the input file",
    "--text=one --reference-text=one": "--reference-text is given without a reference",
    "--text=one --out=a_file/said.wav": "cannot be written; give another path",
    "--text=one --speaker=ann --reference=nothing.wav": "--reference is given with the speaker ann",
    "--text=one --reference=nothing.wav": "error: --reference = nothing.wav, but there is no such file",
    "--text=one --model.flavor=800m": "--model.flavor=800m cannot be changed",
}


@pytest.mark.parametrize("arguments, words", MISTAKES.items())
def test_mistakes_are_refused_before_the_model_is_loaded(
    generate, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.setattr("titan_tts.speak.load_run.load_run", None)
    monkeypatch.setattr("titan_tts.speak.request_lists.MAX_TEXT_BYTES", 1000)
    (tmp_path / "a_file").write_text("")
    (tmp_path / "b.wav").write_bytes(b"\xff")
    given = [f"--{each}" for each in arguments.removeprefix("--").split(" --")]
    assert generate(*given) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error


def test_a_model_that_cannot_speak_is_refused(generate, monkeypatch, capsys):
    monkeypatch.setattr(
        "torchtitan.models.dit_tts.speech.codec.build_codec",
        lambda *_: Echo(latent_channels=CHANNELS + 1),
    )
    assert generate("--text=one") == 2
    assert f"latents of {CHANNELS + 1} channels" in capsys.readouterr().err
    monkeypatch.setattr(generate.loaded.config.model, "flavor", "duration")
    assert generate("--text=one") == 2 and not generate.asked
    assert "run predicts lengths and generates no speech" in capsys.readouterr().err


def test_any_key_of_sampling_may_be_given(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("[sampling]\nsteps = 8\ntext_scale = 2.0\n")

    def chosen(*config_args, **given):
        options = Options(run=str(tmp_path), text="one", config_args=list(config_args), **given)
        return chosen_config(options).sampling

    assert chosen() == Sampling(steps=8, text_scale=2.0)
    keys = ["--sampling.solver", "midpoint", "--sampling.sway", "0.5"]
    expected = Sampling(steps=6, text_scale=0.0, speaker_scale=1.0)
    expected = replace(expected, solver="midpoint", sway=0.5, codec="a.pth")
    given = {"sampling_steps": 6, "text_scale": 0.0, "speaker_scale": 1.0, "codec": "a.pth"}
    assert chosen(*keys, **given) == expected
    refused(lambda: chosen(*keys, sampling_steps=7), "steps = 7", "'midpoint'", "even")
    assert main(["generate", str(tmp_path / "x"), "--text=a", "--sampling.solver=heun"]) == 2
    assert "x does not exist; give outputs/NAME" in capsys.readouterr().err


def test_conditions_and_texts_that_the_run_was_trained_with():
    def conditions(*condition, **given):
        options = Options(run="outputs/a", text="one", condition=list(condition), **given)
        return checked_conditions(find_requests(options)[0], SPEAKING)

    assert conditions(speaker="s07") == {}
    assert conditions("language=de", "speaker=s03") == {"language": "de", "speaker": "s03"}
    assert conditions("language=en=gb") == {"language": "en=gb"}
    for condition, *words in (
        ("speaker=x", "'s00', 's01'", "'s19' and 10 more"),
        ("mood=sad", "has the conditioning tokens speaker, language only; leave it out"),
        ("speaker", "--condition = speaker", "FIELD=VALUE"),
        ("duration=3", "--text: condition duration=3", "--seconds"),
    ):
        refused(lambda given=condition: conditions(given), *words)
    check_text("one", SPEAKING)
    refused(lambda: check_text("oné ½", SPEAKING), "--text", "'½', 'é'", "' enotw'")


def test_text_comes_and_sound_goes_through_pipes(generate, tmp_path, monkeypatch, capsysbinary):
    generate.loaded.config.data.max_frames = 4
    text = "One two one.\nTwo one two.\n\nOne one. Two."
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert generate("--text-file=-", "--out=-", "--speaker=ann") == 0
    out, err = capsysbinary.readouterr()
    sound, rate = soundfile.read(io.BytesIO(out))
    assert int.from_bytes(out[40:44], "little") == len(out) - 44  # told before the second piece
    assert b"first sound after" in err and b"pieces" in err
    (tmp_path / "text.txt").write_text(text)
    said = ["--text-file=text.txt", "--speaker=ann"]
    for kind in ("wav", "pcm", "mp3", "ogg"):
        assert generate(*said, "--out=-", f"--format={kind}") == 0
        content = capsysbinary.readouterr().out
        if kind == "pcm":
            assert content == out[44:]
        else:
            again, its_rate = soundfile.read(io.BytesIO(content))
            assert len(again) / its_rate == pytest.approx(len(sound) / rate, abs=0.2)
    assert generate(*said, "--out=a.ogg") == 0 and soundfile.info("a.ogg").subtype == "OPUS"

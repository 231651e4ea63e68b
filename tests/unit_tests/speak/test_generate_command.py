"""`titan-tts generate`: what it refuses, and what it asks of the model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tests.helpers.row_model import CHANNELS
from tests.helpers.sampled_run import HOP, Echo
from tests.helpers.sentences import refused
from titan_tts.cli import main
from titan_tts.speak import sampling_options
from titan_tts.speak.generate import requested_conditions
from titan_tts.speak.generate_command import Options, find_requests
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.durations import LinearDurationModel
from torchtitan.models.dit_tts.text.tokenizer import Tokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary

SPEAKING = Tokenizer(
    make_vocabulary(
        "chars",
        "one two",
        ["speaker", "language", "duration"],
        {"speaker": [f"s{number:02d}" for number in range(30)], "language": ["de", "en=gb"]},
        max_seconds=9,
    )
)
SAMPLING = Sampling(steps=4, text_scale=2.0, speaker_scale=3.0, min_t=0.25)


@pytest.fixture
def asked(loaded, monkeypatch):
    """What `generate` asks of the model of `loaded`."""
    asked = {}

    def generated(model, tokenizer, objective, requests, sampling, seed, *more):
        asked.update(request=requests[0], settings=(sampling, seed))
        assert model is loaded.model and len(requests) == 1
        return [torch.linspace(-50, 50, requests[0].frames)[:, None].expand(-1, CHANNELS)]

    for name, replacement in (
        ("torchtitan.models.dit_tts.speech.codec.build_codec", lambda *arguments: Echo()),
        ("torchtitan.models.dit_tts.speech.codec.record.check_codec", lambda *arguments: None),
        (
            "torchtitan.models.dit_tts.config.manager.load_run_config",
            lambda folder, args=(): loaded.config,
        ),
        ("titan_tts.speak.load_run.load_run", lambda *arguments: loaded),
        ("titan_tts.speak.synthesizer.generate_latents", generated),
    ):
        monkeypatch.setattr(name, replacement)
    return asked


@pytest.mark.parametrize(
    "arguments, speaker, frames, settings",
    [
        # Sample 3 has the longest of bob's references, and 2 of ann's.
        (["--speaker=bob", "--seconds=1.23"], 3, 31, (SAMPLING, 0)),
        (
            ["--speaker=ann", "--seconds=0.001", "--text-scale=0", "--speaker-scale=5"]
            + ["--sampling-steps=9", "--seed=6"],
            2,
            1,
            (replace(SAMPLING, steps=9, text_scale=0.0, speaker_scale=5.0), 6),
        ),
    ],
)
def test_it_asks_for_what_the_options_say(asked, tmp_path, arguments, speaker, frames, settings):
    out = tmp_path / "new" / "said.wav"
    assert main(["generate", "run", "--text=one", f"--out={out}", *arguments]) == 0
    request = asked["request"]
    assert asked["settings"] == settings and request.text == "one" and request.frames == frames
    assert request.reference.shape == (6, CHANNELS)  # cut to what the run takes
    assert (request.reference == speaker + 10).all()
    name = arguments[0].removeprefix("--speaker=")
    assert request.metadata == {"speaker": name, "target_duration": frames / 25}
    wav, rate = soundfile.read(out)
    assert rate == 100 and len(wav) == frames * HOP
    assert np.abs(wav - np.repeat(np.linspace(-0.5, 0.5, frames), HOP)).max() < 1e-4


def test_the_length_is_estimated_from_the_text_and_the_speakers_rate(asked, tmp_path, monkeypatch):
    weights = np.zeros(257)
    weights[ord("o")] = 5
    monkeypatch.setattr(
        "titan_tts.speak.speech_data.fit_durations",
        lambda dataset: LinearDurationModel(weights, {"ann": 3.0, "bob": 1.0}),
    )
    words = ["generate", "run", "--text=too", f"--out={tmp_path / 'said.wav'}", "--speaker=ann"]
    assert main(words) == 0 and asked["request"].frames == 30
    assert main([*words, "--duration-scale=0.5"]) == 0 and asked["request"].frames == 15


def test_a_run_that_keeps_its_fit_needs_no_training_data(
    asked, loaded, tmp_path, monkeypatch, capsys
):
    """Where the text of a recording is given, all of the recording counts."""
    weights = np.zeros(257)
    weights[ord("o")] = 5
    monkeypatch.setattr(
        "titan_tts.speak.speech_data.stored_durations",
        lambda folder: LinearDurationModel(weights, {}) if folder == Path("run") else None,
    )
    monkeypatch.setattr(
        "titan_tts.speak.synthesizer.encode_reference",
        lambda path, codec, settings, limit: torch.zeros(min(limit, 100), CHANNELS),
    )
    loaded.config.data.path = "gone"
    reference = tmp_path / "voice.wav"
    reference.touch()
    words = ["generate", "run", "--text=too", f"--out={tmp_path / 'said.wav'}"]
    words.append(f"--reference={reference}")
    assert main(words) == 0 and asked["request"].frames == 10
    assert "0.40 s (by the fit on the training data)" in capsys.readouterr().out
    assert main([*words, "--reference-text=ooooo"]) == 0 and asked["request"].frames == 20
    assert asked["request"].reference.shape == (6, CHANNELS)
    assert main([*words, "--reference-text=ooooo", "--duration=rate"]) == 0
    assert asked["request"].frames == 60


def test_a_predictor_of_lengths_cannot_speak(asked, loaded, monkeypatch, capsys):
    monkeypatch.setattr(loaded.config.model, "flavor", "duration")
    assert main(["generate", "run", "--text=one", "--speaker=ann"]) == 2
    assert "run predicts lengths and says nothing" in capsys.readouterr().err


def test_a_codec_of_another_width_is_refused(asked, monkeypatch, capsys):
    monkeypatch.setattr(
        "torchtitan.models.dit_tts.speech.codec.build_codec",
        lambda *_: Echo(latent_channels=CHANNELS + 1),
    )
    assert main(["generate", "run", "--text=one", "--speaker=ann"]) == 2
    assert f"latents of {CHANNELS + 1} channels" in capsys.readouterr().err
    assert asked == {}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--text= "], "--text is empty"),
        (["--text-file=a_file"], "give one of --text"),
        (["--no-text", "--text-file=a_file"], "--text-file a_file is empty"),
        (["--no-text", "--text-file=nothing"], "nothing: cannot be read"),
        (
            ["--no-text", "--text-file=/dev/zero"],
            "/dev/zero: has more than 0 MiB; give it in parts",
        ),
        (["--no-text", "--text-list=/dev/zero", "--out=new"], "/dev/zero: has more than 0 MiB"),
        (["--no-text", "--text-list=a_file", "--out=new"], "a_file: has no line"),
        (["--no-text", "--text-list=a_file"], "give their folder by --out"),
        (["--seconds=1e6"], "--seconds = 1e+06, but"),
        (["--out=said.doc"], "must end with one of .wav, .flac"),
        (["--takes=0"], "--takes = 0"),
        (["--overwrite", "--resume"], "either --overwrite or --resume"),
        (["--resume"], "one text replaces its file"),
        (["--out=a_file.wav", "--format=wav"], "of a file its name has the format"),
        (["--speaker", "--reference=a.wav", "--out=a.wav"], "that is what is read"),
        (["--reference-text=one"], "reference text without the reference"),
        (["--duration=rate"], "--duration = rate needs --reference with --reference-text"),
        (["--duration-scale=0"], "--duration-scale = 0"),
        (["--out=a_file/said.wav"], "no file can be written there"),
        (["--reference=nothing.wav"], "either a reference or a speaker"),
        (["--reference=nothing.wav", "--speaker"], "no such file"),
        (["--sampling-steps=0"], "--sampling-steps = 0, but"),
        (["--seconds=nan"], "--seconds = nan, but"),
        (["--text-scale=nan"], "--text-scale = nan, but"),
        (["--speaker-scale=-inf"], "--speaker-scale = -inf, but"),
        (["--seed=1180591620717411303424"], "--seed = 1180591620717411303424, but"),
        (["--sampling-steps=1180591620717411303424"], "it must be from 1 to 10000"),
        ([], "run is no run's folder"),
        (["--sampling.solver=midpoint"], "run is no run's folder"),
        (["--model.flavor=800m"], "--model.flavor=800m cannot be changed"),
    ],
)
def test_mistakes_are_refused_before_the_run_is_loaded(
    tmp_path, monkeypatch, capsys, arguments, words
):
    def load_run(*_):
        raise AssertionError

    monkeypatch.setattr("titan_tts.speak.load_run.load_run", load_run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("titan_tts.speak.request_lists.MAX_TEXT_BYTES", 1000)
    (tmp_path / "a_file").write_text("")
    voice = [] if "--speaker" in arguments else ["--speaker=ann"]
    text = [] if "--no-text" in arguments else ["--text=one"]
    arguments = [each for each in arguments if each not in ("--speaker", "--no-text")]
    assert main(["generate", "run", *text, *voice, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_any_key_of_sampling_may_be_given(tmp_path):
    (tmp_path / "config.toml").write_text("[sampling]\nsteps = 8\ntext_scale = 2.0\n")

    def chosen(*config_args, **given):
        options = Options(run=str(tmp_path), text="one", config_args=list(config_args), **given)
        return sampling_options.chosen_config(options).sampling

    assert chosen() == Sampling(steps=8, text_scale=2.0)
    keys = ["--sampling.solver", "midpoint", "--sampling.cfg_zero_star", "true"]
    expected = Sampling(steps=6, text_scale=0.0, speaker_scale=1.0)
    expected = replace(expected, solver="midpoint", cfg_zero_star=True, codec="a.pth")
    given = {"sampling_steps": 6, "text_scale": 0.0, "speaker_scale": 1.0, "codec": "a.pth"}
    assert chosen(*keys, **given) == expected
    refused(lambda: chosen(*keys, sampling_steps=7), "steps = 7", "'midpoint'", "even")


@pytest.mark.parametrize(
    "given, conditions",
    [
        ({"speaker": "of other shards"}, {}),
        ({"condition": ["language=de"], "speaker": "s07"}, {"language": "de", "speaker": "s07"}),
        ({"condition": ["speaker=s03"], "speaker": "s07"}, {"speaker": "s03"}),
        ({"condition": ["language=en=gb"]}, {"language": "en=gb"}),
    ],
)
def test_conditions_that_are_asked_for(given, conditions):
    [request] = find_requests(Options(run="outputs/a", text="one", **given))
    assert requested_conditions(request, SPEAKING) == conditions


@pytest.mark.parametrize(
    "condition, words",
    [
        ("speaker=x", ["speaker=x", "'s00', 's01'", "'s19' and 10 more"]),
        ("mood=sad", ["mood=sad", "has the conditioning tokens speaker, language"]),
        ("speaker", ["--condition = speaker", "FIELD=VALUE"]),
        ("duration=3", ["--text: condition duration=3", "--seconds"]),
    ],
)
def test_conditions_that_the_run_does_not_know(condition, words):
    options = Options(run="outputs/a", text="one", condition=[condition])
    refused(lambda: requested_conditions(find_requests(options)[0], SPEAKING), *words)


def test_what_the_run_was_never_trained_on(capsys):
    sampling_options.check_text("one", SPEAKING)
    with pytest.raises(InputError, match="--text .*'½', 'é'.*' enotw'"):
        sampling_options.check_text("oné ½", SPEAKING)
    sampling_options.warn_of_untrained_tokens({"speaker": "s01"}, SPEAKING)
    assert "language not given" in capsys.readouterr().err
    trained = Tokenizer(SPEAKING.vocabulary, conditioning_dropout=0.1)
    sampling_options.warn_of_untrained_tokens({}, trained)
    sampling_options.warn_of_untrained_tokens({"speaker": "s01", "language": "de"}, SPEAKING)
    assert capsys.readouterr().err == ""


def test_what_is_not_there_is_told_before_the_model_is_loaded(
    asked, loaded, monkeypatch, tmp_path, capsys
):
    """A function that the run's own config names is not there, either: the folder may be a stranger's."""
    monkeypatch.setattr(
        "titan_tts.speak.load_run.load_run",
        lambda *arguments: pytest.fail("the model was loaded"),
    )
    loaded.config.samples.recognizer = "shutil:rmtree"
    missing = "whisper:/nowhere/whisper"
    for arguments, words in (
        (
            ["--speaker=eve"],
            "error: --speaker = eve, but the data have no such speaker; they have: 'ann', 'bob'",
        ),
        (["--takes=2"], "if you trust it give --recognizer shutil:rmtree"),
        (["--takes=2", f"--recognizer={missing}"], f"'{missing}' cannot be loaded"),
        (["--reference=nowhere.wav"], "reference = nowhere.wav, but there is no such file"),
    ):
        out = f"--out={tmp_path / 'said.wav'}"
        assert main(["generate", "run", "--text=one", out, *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1, said

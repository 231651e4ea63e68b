"""A config in a folder that is read may be a stranger's: it makes no program call a function."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.sentences import refused
from titan_tts.evaluate.options import scorer_specs
from titan_tts.speak.sampling_options import SamplingOptions, chosen_config
from torchtitan.models.dit_tts.config.exported import (
    CONFIG,
    FINE_TUNE,
    WEIGHTS,
    fine_tune_config,
    kept,
)
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import load_config, load_run_config

NONE = {"recognizer": "", "speaker_scorer": "", "opinion": ""}


@pytest.mark.parametrize(
    "name, spec",
    [
        ("recognizer", "shutil:rmtree"),
        ("recognizer", "xvector:rmtree"),  # of another key it is the program's own
        ("opinion", "dnsmos:rmtree"),
    ],
)
def test_a_run_names_no_function(name, spec):
    own = {"recognizer": "faster-whisper:/some/folder", "opinion": "dnsmos"}
    own["speaker_scorer"] = "xvector:a/b"
    config = SimpleNamespace(samples=SimpleNamespace(**own))
    assert scorer_specs(SimpleNamespace(**NONE), config) == own
    setattr(config.samples, name, spec)
    words = f"'{spec}' is a function", f"--{name} {spec}"
    refused(lambda: scorer_specs(SimpleNamespace(**NONE), config), *words)
    trusted = SimpleNamespace(**NONE | {name: spec})
    assert scorer_specs(trusted, config)[name] == spec


def test_a_folder_names_no_codec_that_is_a_function(tmp_path):
    hostile = "shutil:rmtree"
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(f'[sampling]\ncodec = "{hostile}"\n')
    words = f"codec = '{hostile}' is a function", f"--codec {hostile}"
    refused(lambda: chosen_config(SamplingOptions(run=str(run))), *words)
    for given in ({"codec": hostile}, {"config_args": ["--sampling.codec", hostile]}):
        trusted = chosen_config(SamplingOptions(run=str(run), **given))
        assert trusted.sampling.codec == hostile
    for name in (CONFIG, WEIGHTS):
        (run / name).touch()
    shown = f"--sampling.codec {hostile}"
    refused(lambda: load_config([f"--job.config_file={run / 'config.toml'}"]), words[0], shown)


def test_an_export_keeps_what_its_model_depends_on():
    config = JobConfig()
    config.model.text_positions, config.encoder.n_heads = "aligned", 7
    config.data.conditioning, config.data.duration_token_seconds = ["language"], 0.5
    for found in (kept(config), fine_tune_config(config, "mel_dct", "")):
        assert found["model"]["text_positions"] == "aligned" and found["encoder"]["n_heads"] == 7
        assert found["data"]["conditioning"] == ["language"]
        assert found["data"]["duration_token_seconds"] == 0.5
    # No scorer of speech for a fine-tune: it could be any function on the machine of whoever fine-tunes.
    config.samples.recognizer, config.samples.freq = "words:one", 100
    config.validation.keep_best = "wer"
    sections, of_file = (fine_tune_config(config, codec, "bytes") for codec in ("mel_dct", ""))
    assert sections["sampling"]["codec"] == "mel_dct" and "codec" not in of_file["sampling"]
    assert "vocab_size" not in sections["encoder"]  # new data may bring more ids
    assert "keep_best" not in sections["validation"] and "samples" not in sections


def test_no_module_is_imported_because_a_config_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("hostile.py").write_text("open('called', 'w')\nclass JobConfig: pass\n")
    for line in ("[job]\ncustom_config_module", "[experimental]\ncustom_args_module"):
        Path("config.toml").write_text(f"{line} = 'hostile'\n")
        refused(lambda: load_run_config(tmp_path), "custom_config_module", "remove it")
    assert not Path("called").exists()


def test_the_config_for_a_fine_tune_is_the_stranger_s_that_exported_it(tmp_path):
    config, exported = tmp_path / FINE_TUNE, [tmp_path / CONFIG, tmp_path / WEIGHTS]
    given = ["--job.config_file", str(config)]
    config.write_text("[samples]\nrecognizer = 'shutil:rmtree'")
    load_config(given)  # the user's own
    for each in exported:
        each.touch()
    refused(lambda: load_config(given), "--samples.recognizer", "if you trust it")
    config.write_text("[samples]\nrecognizer = 'whisper:base'")
    assert load_config([*given, "--samples.opinion=a:b"]).samples.opinion == "a:b"

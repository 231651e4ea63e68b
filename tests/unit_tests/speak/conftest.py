"""`titan-tts generate` with a run to sample from."""

import pytest

from tests.helpers import sampled_run
from tests.helpers.sampled_run import loaded, shards  # noqa: F401
from tests.helpers.served import synthesizer  # noqa: F401
from titan_tts.cli import main
from torchtitan.models.dit_tts.speech.sampling.sampler import generate_latents


@pytest.fixture
def generate(loaded, tmp_path, monkeypatch):  # noqa: F811
    """`titan-tts generate run` in the test's folder; `asked` has what the sampler was given, `loads` what
    the run and its codec were loaded with."""
    asked, loads = [], []

    def sample(model, tokenizer, objective, requests, sampling, seed, *more):
        assert model is loaded.model
        asked.append((requests, sampling, seed))
        return generate_latents(model, tokenizer, objective, requests, sampling, seed, *more)

    package = "torchtitan.models.dit_tts"
    for name, replacement in (
        (f"{package}.speech.codec.build_codec", lambda *a: loads.append(a) or sampled_run.Echo()),
        (f"{package}.speech.codec.record.check_codec", lambda *_: None),
        (f"{package}.config.manager.load_run_config", lambda folder, args=(): loaded.config),
        ("titan_tts.speak.open_run.load_run_config", lambda folder, args=(): loaded.config),
        ("titan_tts.speak.load_run.load_run", lambda *a, **k: loads.append((*a, k)) or loaded),
        ("titan_tts.speak.synthesizer.generate_latents", sample),
    ):
        monkeypatch.setattr(name, replacement)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/checkpoint/step-7").mkdir(parents=True)
    sampled_run.write_durations(tmp_path / "run", loaded.config)

    def command(*arguments):
        return main(["generate", "run", *map(str, arguments)])

    command.asked, command.loads, command.loaded = asked, loads, loaded
    return command

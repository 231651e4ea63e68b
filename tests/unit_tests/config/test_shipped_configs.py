"""The configs that the repository ships can start, on every number of ranks that divides the batch."""

import socket
from pathlib import Path

import pytest

from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.main import train

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "train_configs").glob("*.toml"))

# Flavor: text encoder, its parameters, and those that are trained.
PRETRAINED = {
    "800M": ("google/t5gemma-2-270m-270m", "268,098,816", "780,973,696"),
    "3B": ("google/t5gemma-2-1b-1b", "999,887,104", "3,507,659,904"),
    "8B": ("google/t5gemma-2-4b-4b", "3,880,101,888", "8,238,706,816"),
}
CODEC = "facebook/dacvae-watermarked"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_valid_on_every_fitting_number_of_ranks(path):
    config = load_config(["--job.config_file", str(path)])
    flavors = model_flavors()
    flavors[config.model.flavor].update_from_config(config, download=False)
    training = config.training
    fitting = [
        ranks
        for ranks in (1, 2, 4, 8, 16, 32, 64, 128)
        if training.global_batch_size % (max(training.local_batch_size, 1) * ranks) == 0
    ]
    assert len(fitting) >= 3
    for ranks in fitting:
        validate_config(config, ranks, list(flavors))


@pytest.mark.long
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_dry_run_shows_the_exact_counts(path, capsys, monkeypatch):
    """Without data, network or the encoder's weights."""

    def no_network(*args):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    config = load_config(["--job.config_file", str(path)])
    assert train(["--job.config_file", str(path), "--dry-run"]) == 0
    words = capsys.readouterr().out.split()
    if config.model.flavor == "debug":
        assert config.encoder.model == "bytes" and config.sampling.codec == "mel_dct"
        assert "3,855,872" in words and "MISSING" not in words
        return
    encoder, frozen, trained = PRETRAINED[config.model.flavor]
    assert (config.encoder.model, config.encoder.frozen) == (encoder, True)
    assert (config.sampling.codec, config.data.max_text_tokens) == (CODEC, 192)
    assert encoder in words and CODEC in words
    assert words.count(frozen) == 2 and trained in words  # the encoder's row and the sum

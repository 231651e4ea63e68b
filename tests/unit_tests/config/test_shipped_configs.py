"""The configs that the repository ships can start, on every number of ranks that divides the batch."""

import socket
from pathlib import Path

import pytest

from titan_tts.cli import main
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.manager import load_config

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "train_configs").glob("*.toml"))

# Flavor: text encoder, its parameters, and those that are trained.
PRETRAINED = {
    "800M": ("google/t5gemma-2-270m-270m", "268,098,816", "780,973,696"),
    "3B": ("google/t5gemma-2-1b-1b", "999,887,104", "3,507,659,904"),
    "8B": ("google/t5gemma-2-4b-4b", "3,880,101,888", "8,238,706,816"),
}
# Those that need no download, with their learned text encoder.
EMBEDDED = {"debug": "3,855,872", "18M": "17,601,280", "60M": "61,402,240", "duration": "1,074,177"}
ONE_OF_A_FLAVOR = [
    path
    for path in CONFIGS
    if path.stem.removeprefix("dit_tts_") in "debug small duration 800m 3b 8b"
]
CODEC = "facebook/dacvae-watermarked"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_valid_on_every_fitting_number_of_ranks(path):
    config = load_config(["--job.config_file", str(path)])
    flavors = model_flavors()
    flavors[config.model.flavor].update_from_config(config, download=False)
    training = config.training
    fitting = [
        ranks
        for ranks in (1, 2, 4, 8, 16, 32, 64)
        if training.global_batch_size % (max(training.local_batch_size, 1) * ranks) == 0
    ]
    assert {1, 8, 64} <= set(fitting) if config.model.flavor in PRETRAINED else 1 in fitting
    for ranks in fitting:
        gpus = ranks * config.parallelism.tensor_parallel_degree
        validate_config(config, gpus, list(flavors))


def test_a_student_speaks_in_four_steps_without_guidance():
    [path] = [path for path in CONFIGS if path.stem == "distill"]
    sampling = load_config(["--job.config_file", str(path)]).sampling
    assert (sampling.steps, sampling.text_scale) == (4, 0.0)


# Micro-batch and accumulation steps of the 1,024 samples on 64 GPUs.
TABLE = {"800m": (16, 1), "3b": (16, 1), "8b": (8, 2)}


@pytest.mark.long
@pytest.mark.parametrize("path", ONE_OF_A_FLAVOR, ids=lambda path: path.stem)
def test_dry_run_shows_the_exact_counts(path, capsys, monkeypatch):
    """Without data, network or the encoder's weights."""
    monkeypatch.setattr(socket.socket, "connect", None)
    config = load_config(["--job.config_file", str(path)])
    batches = TABLE.get(path.stem.removeprefix("dit_tts_"))
    assert main(["train", str(path), "--dry-run", f"--nproc={64 if batches else 1}"]) == 0
    words = (printed := capsys.readouterr().out).split()
    if config.model.flavor in EMBEDDED:
        assert config.encoder.model == "bytes" and config.sampling.codec == "mel_dct"
        assert EMBEDDED[config.model.flavor] in words
        return
    encoder, frozen, trained = PRETRAINED[config.model.flavor]
    assert (config.encoder.model, config.encoder.frozen) == (encoder, True)
    assert (config.sampling.codec, config.data.max_text_tokens) == (CODEC, 192)
    assert encoder in words
    assert words.count(frozen) == 2 and trained in words  # the encoder's row and the sum
    samples, steps = batches
    assert f"64 ranks x {samples} samples x {steps} accumulation steps = 1,024 samples" in printed

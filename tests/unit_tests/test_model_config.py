"""The model's sizes from a config."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from tests.helpers.pretrained_checkpoints import write_tiny_t5
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model_config import model_flavors
from torchtitan.models.dit_tts.train_spec import build_model


def test_the_config_sets_sizes_of_a_copy():
    config = JobConfig()
    config.data.latent_channels, config.data.speaker_patch_size = 24, 2
    config.attention.backend, config.model.text_positions = "varlen", "aligned"
    config.encoder.dim, config.encoder.n_layers, config.encoder.n_heads = 32, 1, 2
    args = model_flavors()["debug"]
    before = replace(args)
    args.update_from_config(config)
    assert (args.latent_channels, args.speaker_patch_size) == (24, 2)
    assert (args.text_vocab_size, args.attention) == (259, "varlen")
    assert (args.text_dim, args.text_n_layers, args.text_n_heads) == (32, 1, 2)
    assert args.text_positions == "aligned"
    assert model_flavors()["debug"] == before
    config.encoder.vocab_size = 300
    args.update_from_config(config)
    assert args.text_vocab_size == 300
    config.encoder.vocab_size = 0
    config.data.conditioning = ["speaker"]
    with pytest.raises(InputError, match="vocab_size = 0"):
        args.update_from_config(config)


def test_the_flavor_that_no_shipped_config_has():
    args = model_flavors()["300M"]
    args.update_from_config(JobConfig())
    with torch.device("meta"):
        assert sum(p.numel() for p in build_model(args).parameters()) == 314_595_456


@pytest.mark.parametrize(
    "section, key, value",
    [
        ("encoder", "n_heads", 0),
        ("encoder", "n_heads", 128),
        ("encoder", "n_heads", 3),
    ],
)
def test_sizes_that_do_not_fit(section, key, value):
    config = JobConfig()
    setattr(getattr(config, section), key, value)
    with pytest.raises(InputError, match=rf"\[{section}\] {key} = {value}\b"):
        model_flavors()["debug"].update_from_config(config)


def test_a_trained_encoder_is_built_from_what_can_be_logged(tmp_path):
    """Upstream's trainer writes the args as JSON."""
    config = JobConfig()
    config.encoder.model, config.encoder.frozen = str(write_tiny_t5(tmp_path / "t5")), False
    args = model_flavors()["debug"]
    args.update_from_config(config)
    assert "t5" in json.dumps(asdict(args)["text_encoder"])
    assert args.text_encoder().width == args.text_dim


@pytest.mark.parametrize("flavor, fitting", [("800M", {1, 2, 5, 10}), ("3B", {1, 2, 4, 5, 10, 20})])
def test_degrees_of_tensor_parallelism(flavor, fitting):
    config = JobConfig()
    config.model.flavor = flavor
    for degree in range(1, 21):
        config.parallelism.tensor_parallel_degree = degree
        if degree in fitting:
            model_flavors()[flavor].update_from_config(config)
            continue
        with pytest.raises(InputError, match=f"tensor_parallel_degree = {degree}, .* heads"):
            model_flavors()[flavor].update_from_config(config)

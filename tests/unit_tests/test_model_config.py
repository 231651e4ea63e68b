"""The model's sizes from a config."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.helpers.pretrained_checkpoints import write_tiny_t5
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.flops import MicroBatch, executed_flops
from torchtitan.models.dit_tts.model_config import model_flavors, write_sizes


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
    for heads in (0, 128, 3):
        config.encoder.n_heads = heads
        with pytest.raises(InputError, match=rf"\[encoder\] n_heads = {heads}\b"):
            args.update_from_config(config)
    config.encoder.vocab_size = 0
    config.data.conditioning = ["speaker"]
    with pytest.raises(InputError, match="vocab_size = 0"):
        args.update_from_config(config)


def sized(*sizes, **data):
    config = JobConfig()
    config.model.sizes = list(sizes)
    for key, value in data.items():
        setattr(config.data, key, value)
    args = model_flavors()["debug"]
    args.update_from_config(config)
    return args


def test_sizes_that_differ_from_the_flavors():
    args = sized("dim=320", "n_heads = 5", "text_projection=false", "norm_eps=1e-05")
    assert (args.dim, args.n_heads, args.text_projection, args.norm_eps) == (320, 5, False, 1e-5)
    assert args.n_layers == model_flavors()["debug"].n_layers
    given = write_sizes(args, "debug")
    assert sorted(given) == ["dim=320", "n_heads=5", "norm_eps=1e-05", "text_projection=false"]
    assert sized(*given) == args and write_sizes(sized(), "debug") == []


@pytest.mark.parametrize(
    "sizes, words",
    [
        (["dim"], "has 'dim'"),
        (["latent_channels=8"], "'latent_channels=8', but each must be FIELD=VALUE"),
        (["dim=64", "dim=32"], "'dim=32', but each"),
        (["dim=6.5"], "dim must be a int from 1"),
        (["n_layers=0"], "n_layers must be a int from 1 to 1048576"),
        (["mlp_dim=1048577"], "mlp_dim must be a int from 1 to 1048576"),
        (["norm_eps=nan"], "norm_eps must be a float from 0"),
        (["text_projection=no"], "has 'text_projection=no'"),
        (["text_projection=1"], "must be true or false"),
        (["n_heads=5"], "n_heads = 5 for dim = 192"),
        (["n_heads=64"], "n_heads = 64 for dim = 192"),  # a width of 3 is odd
        (["speaker_dim=33"], "speaker_n_heads = 2 for speaker_dim = 33"),
        (["timestep_dim=7"], "timestep_dim = 7"),
    ],
)
def test_sizes_that_are_refused(sizes, words):
    with pytest.raises(InputError, match=re.escape(words)):
        sized(*sizes)


def test_sizes_that_need_other_keys(tmp_path):
    with pytest.raises(InputError, match="no place for their mean"):
        sized("speaker_bidirectional=true", batching="packed")
    with pytest.raises(InputError, match="without references a model needs captions"):
        sized("speaker_reference=false")
    assert not sized("speaker_reference=false", max_caption_tokens=9).speaker_reference
    config = JobConfig()
    config.model.sizes = ["text_projection=false"]
    config.encoder.model = str(write_tiny_t5(tmp_path / "t5"))
    with pytest.raises(InputError, match="only a learned encoder"):
        model_flavors()["debug"].update_from_config(config)


def test_a_frozen_encoder_counts_forward_alone(tmp_path):
    """Where it is trained its backward pass costs twice as much."""
    config, flops = JobConfig(), []
    config.encoder.model = str(write_tiny_t5(tmp_path / "t5"))
    batch = MicroBatch((2, 8, 4, 4), [(8, 4, 4), (6, 3, 2)], ((2, 4), (1, 8)))
    for config.encoder.frozen in (False, True):
        args = model_flavors()["debug"]
        args.update_from_config(config)
        without = executed_flops(replace(args, text_encoder_sizes=None), batch)
        flops.append(executed_flops(args, batch) - without)
    assert flops[0] == 3 * flops[1] > 0


@pytest.mark.parametrize("enable, seeds", [(True, False), (False, False), (True, True)])
def test_a_trained_encoder_starts_from_its_checkpoint_once(tmp_path, enable, seeds):
    """A run that resumes has its weights in a checkpoint, unless it writes none or makes the first."""
    config = JobConfig()
    config.encoder.model, config.encoder.frozen = str(write_tiny_t5(tmp_path / "t5")), False
    config.checkpoint.enable, config.checkpoint.create_seed_checkpoint = enable, seeds
    (step := tmp_path / "run/checkpoint/step-2").mkdir(parents=True)
    args = model_flavors()["debug"]
    for saved in (False, True):
        if saved:
            (step / ".metadata").touch()
        args.update_from_config(config, folder=tmp_path / "run")
        assert args.text_encoder_starts == (not saved or (enable, seeds) != (True, False))


@pytest.mark.parametrize("degree", range(1, 21))
def test_degrees_of_tensor_parallelism_divide_heads_and_units(degree):
    config = JobConfig()
    config.parallelism.tensor_parallel_degree = degree
    fits = degree in (1, 2, 4, 5, 10, 20)
    refusal = pytest.raises(InputError, match=f"tensor_parallel_degree = {degree}, .* heads")
    with nullcontext() if fits else refusal:
        model_flavors()["3B"].update_from_config(config)

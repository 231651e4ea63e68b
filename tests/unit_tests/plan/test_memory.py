"""Bytes of one GPU: of small weights by hand, of a real model against what training's own function shards."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.helpers.fake_ranks import fake_process_group
from tests.helpers.plan_cases import H200, debug_config, step_of
from titan_tts.plan.parameters import HEAD, ROOT, Model, Weight, describe_model
from titan_tts.plan.step import Layout
from torchtitan.models.dit_tts import get_train_spec, model_flavors
from torchtitan.models.dit_tts.config.job_config import Megatron
from torchtitan.models.dit_tts.infra.parallelize import local_tensor
from torchtitan.models.dit_tts.model.flops import Lengths

# Two blocks, whose large matrices tensor parallelism divides by rows and by columns; 143 numbers.
WEIGHTS = (
    Weight("layers.0.up", (6, 10), True, 0, True, "layers.0"),
    Weight("layers.1.down", (10, 6), True, 1, True, "layers.1"),
    Weight("norm", (3,), True, None, False, HEAD),
    Weight("input", (5, 4), True, None, False, ROOT),
)
MODEL = Model(model_flavors()["debug"], 0, WEIGHTS, "")
AVERAGES = {"decays": [0.9, 0.99]}


@pytest.mark.parametrize(
    "name, layout, weights, optimizer, passing",
    [
        # 2 x 10, 3 x 6, 1 and 2 x 4 numbers. The root, the head and the last block stay gathered (83 numbers), the
        # first block comes and the next with it (2 x 60); its gradients in both dtypes.
        ("FSDP2", Layout(1, 4), 188, 2 * 188 + 16, {"gathered weights": 2 * 203, "gradients in flight": 360}),
        # 3 x 10, 5 x 6, 2 and 3 x 4.
        ("HSDP", Layout(2, 2), 296, 2 * 296 + 16, {"gathered weights": 2 * 203, "gradients in flight": 360}),
        # Of 3 x 10 and 10 x 3: 2 x 10 and 5 x 3; 2 and 3 x 4.
        ("TP 2 x FSDP2", Layout(1, 2, 2), 196, 2 * 196 + 16, {"gathered weights": 2 * 113, "gradients in flight": 180}),
        ("DDP", Layout(4, 1), 572, 2 * 572 + 16, {"second copy of weights": 572, "weights in the compute dtype": 286}),
        ("one GPU", Layout(1, 1), 572, 2 * 572 + 16, {"weights in the compute dtype": 286}),
    ],
)  # fmt: skip
def test_bytes_of_a_layout(name, layout, weights, optimizer, passing):
    config = debug_config(ema=AVERAGES)
    assert layout.name == name
    lasting = {"weights": weights, "gradients": weights, "optimizer": optimizer, "EMA": 2 * weights}
    step = step_of(config, MODEL, layout)
    assert (step.lasting, step.passing()) == (lasting, passing)
    frozen = replace(MODEL, weights=(*WEIGHTS[:3], replace(WEIGHTS[3], trained=False)))
    own = WEIGHTS[3].local_numel(layout.shards, layout.tensor)
    less = step_of(config, frozen, layout).lasting
    assert less["weights"] == weights and less["gradients"] == weights - 4 * own
    assert less["EMA"] == 2 * less["gradients"] and less["optimizer"] == optimizer - 8 * own - 4


@pytest.mark.parametrize(
    "arguments, optimizer",
    [
        # One moment of the two large matrices (20 and 18 numbers), two of the others, and their counts.
        (["--optimizer.name=Muon"], 4 * 38 + 8 * 9 + 8),
        (["--optimizer.state_dtype=8bit"], 8 * 47 + 16),  # below 4,096 numbers nothing is quantised
    ],
)
def test_states_of_optimizers(arguments, optimizer):
    config = debug_config(*arguments)
    assert step_of(config, MODEL, Layout(1, 4)).lasting["optimizer"] == optimizer
    large = replace(MODEL, weights=(replace(WEIGHTS[3], shape=(64, 512)),))
    found = step_of(config, large, Layout(1, 4)).lasting["optimizer"]
    # 8,192 numbers are 32 blocks with a scale; each moment has a table of 256 values.
    expected = 2 * (8192 + 4 * 32 + 4 * 256) if "8bit" in arguments[0] else 2 * 4 * 8192
    assert found == 4 + expected


def test_units_that_stay_or_are_fetched_ahead():
    def passing(**keys) -> dict[str, int]:
        return step_of(debug_config(parallelism=keys), MODEL, Layout(1, 4), 12, 2).passing()

    def gathered(**keys) -> int:
        return passing(**keys)["gathered weights"]

    assert "complete gradients" not in passing()
    assert passing(fsdp_reshard_after_forward="never")["complete gradients"] == 4 * 143
    assert gathered(fsdp_reshard_after_forward="never") == 2 * 143


@pytest.mark.parametrize("layout", [Layout(1, 4), Layout(2, 3), Layout(4, 1)])
@pytest.mark.parametrize("arguments", [[], ["--lora.rank=8"]])
def test_shards_are_those_of_training(layout, arguments):
    config = debug_config(*arguments)
    plain = replace(config, megatron=Megatron())
    described = describe_model(config)
    with torch.device("meta"):
        model: nn.Module = get_train_spec().model_cls(described.args)
    if arguments:
        from torchtitan.models.dit_tts.infra.adapters import add_adapter

        add_adapter(model, config.lora)
    with fake_process_group(layout) as dims:
        model = get_train_spec().parallelize_fn(model, dims, plain)
        local = [local_tensor(p) for p in model.parameters()]
        size = sum(each.untyped_storage().nbytes() for each in local)
        trained = sum(each.nbytes for each in local if each.requires_grad)
    found = step_of(config, described, layout).lasting
    assert (found["weights"], found["gradients"]) == (size, trained)


def test_a_frozen_encoder_is_whole_on_every_gpu():
    model = replace(MODEL, encoder_parameters=1001)
    config = debug_config(encoder={"dtype": "bfloat16"})
    assert step_of(config, model, Layout(1, 4)).passing()["frozen text encoder"] == 2002


ARGS = replace(model_flavors()["debug"], dim=8, mlp_dim=16, n_layers=4, speaker_n_layers=0)
ARGS = replace(ARGS, latent_channels=5, text_dim=6, text_vocab_size=0)
U = 2 * 10 * (9 * 8 + 3 * 16)  # of 10 frames


def activations(arguments, args, tensor):
    """The step of 3 samples on the GPUs of one rank."""
    model = replace(MODEL, args=args)
    layout, lengths = Layout(1, 1, tensor), Lengths(10, 7, 12)
    return step_of(debug_config(*arguments), model, layout, 3, 1, lengths).activations()


@pytest.mark.parametrize(
    "arguments, tensor, saved",
    [
        (["--compile.no-enable"], 1, 4 * 2.08 * U),
        (["--compile.enable"], 1, 4 * 1.37 * U),
        (["--compile.enable", "--activation_checkpoint.mode=memory_budget"], 1, 4 * 0.95 * U),
        (["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"], 1, 4 * 0.7 * U),
        # Every second block keeps its input, and one is computed again.
        (["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"], 1,
         2 * 2.08 * U + 2 * 2 * 10 * 8 + 2.08 * U),
        (["--activation_checkpoint.mode=full"], 1, 4 * 2 * 10 * 8 + 2.08 * U),
        (["--compile.enable", "--kernels.modulated_norm=triton"], 1, 4 * (1.37 * U + 3 * 2 * 10 * 8)),
        # Heads and units of the MLP are divided, and under sequence parallelism the rest, too.
        (["--compile.no-enable"], 2, 4 * 2.08 * 2 * 10 * (20 + 32 + 24)),
        (["--megatron.sequence_parallel", "--activation_checkpoint.mode=full"], 2, (4 * 2 * 10 * 8 + 2.08 * U) / 2),
        (["--training.mixed_precision_param=float32"], 1, 2 * 4 * 2.08 * U),
    ],
)  # fmt: skip
def test_activations_of_blocks(arguments, tensor, saved):
    found = activations(arguments, ARGS, tensor)
    batch = 3 * 4 * (3 * 10 * 5 + 12 * 5 + 7 * 6)
    assert found == {"micro-batch": batch, "saved activations": pytest.approx(3 * saved, abs=1)}


def test_activations_of_encoders():
    args = replace(ARGS, n_layers=0, speaker_n_layers=2, speaker_dim=4, speaker_mlp_dim=8)
    found = activations(["--compile.no-enable"], args, 1)["saved activations"]
    assert found == pytest.approx(3 * 2.08 * 2 * 2 * 3 * (9 * 4 + 3 * 8), abs=1)  # 3 patches


def test_a_micro_batch_fits_up_to_the_last_byte():
    # 1.5 GiB of context, and 4 % that the allocator cannot use.
    assert replace(H200, memory_gib=100.0).capacity == pytest.approx(94.5 * 2**30, abs=1)

"""Data parallelism on fake ranks: dtypes of communication and inputs. What per-op checkpointing saves."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.calls import Calls
from tests.helpers.fake_ranks import fake_process_group
from tests.helpers.small_models import full_inputs, one_rank, random_model, small_args
from titan_tts.plan.step import Layout
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.infra.parallelize import parallelize_dit_tts, saved_operations
from torchtitan.models.dit_tts.model.model import DiTTTSModel

ARGS = small_args(text_vocab_size=8, latent_channels=8)


def backward(model: DiTTTSModel) -> None:
    torch.manual_seed(1)
    inputs = full_inputs(ARGS, rows=2, frames=6, text=3, speaker=8)
    model(inputs.pop("latents"), inputs.pop("t"), **inputs).square().sum().backward()


def parallelized(dims, *arguments: str) -> DiTTTSModel:
    config = load_config(["--activation_checkpoint.mode=none", *arguments])
    return parallelize_dit_tts(random_model(ARGS), dims, config)


def test_replicas_sum_their_gradients():
    """The loss is already divided by the frames of all ranks. Fake communication changes nothing, so a mean
    over two ranks would be half."""
    expected = random_model(ARGS)
    backward(expected)
    with fake_process_group(Layout(2, 1)) as dims:
        found = parallelized(dims)
        backward(found)
        for (name, value), other in zip(
            expected.named_parameters(), found.parameters(), strict=True
        ):
            torch.testing.assert_close(other.grad.to_local(), value.grad, msg=name)


@pytest.mark.parametrize(
    "replicas, reduced", [(1, torch.float32), (2, torch.float32), (2, torch.bfloat16)]
)
def test_weights_travel_in_bfloat16_and_gradients_as_they_are_to_be_reduced(replicas, reduced):
    seen = []
    reduce = f"--training.mixed_precision_reduce={str(reduced).removeprefix('torch.')}"
    with fake_process_group(Layout(replicas, 2)) as dims, Calls() as calls:
        model = parallelized(dims, "--training.mixed_precision_param=bfloat16", reduce)
        # FSDP's own hook ran before: what the model sees of its inputs.
        model.register_forward_pre_hook(
            lambda _, args: seen.extend(each.dtype for each in args[:2])
        )
        backward(model)
    assert seen == [torch.float32] * 2  # a time in bfloat16 would be another time
    assert calls.dtypes["c10d::_allgather_base_"] == {torch.bfloat16}
    assert calls.dtypes["c10d::_reduce_scatter_base_"] == {reduced}
    assert (calls.dtypes["c10d::allreduce_"] == {reduced}) == (replicas > 1)


@pytest.mark.parametrize(
    "backend, name",
    [
        ("sdpa", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("varlen", "dit_tts::attend_samples"),
    ],
)
def test_per_op_checkpointing_saves_attention_and_every_second_product(backend, name):
    found = []
    for keys in (["mode=none"], ["mode=selective", "selective_ac_option=op"]):
        model = random_model(replace(ARGS, attention=backend))
        config = load_config([f"--activation_checkpoint.{key}" for key in keys])
        model = parallelize_dit_tts(model, one_rank(), config)
        with Calls() as calls:
            backward(model)
        found.append(calls.of)
    whole, saved = found
    assert whole[name] == saved[name] > 0
    # Of a block's six products three are repeated, and of an encoder block's four two.
    assert saved["aten::mm"] == whole["aten::mm"] + 2 * 3 + 2 * 2
    assert torch.ops.torch_attn._varlen_attn.default in saved_operations()

"""Data parallelism on fake ranks: dtypes of communication and inputs. What per-op checkpointing saves."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac

from tests.helpers.calls import Calls
from tests.helpers.fake_ranks import fake_process_group
from tests.helpers.small_models import full_inputs, random_model, small_args
from titan_tts.plan.memory import Layout
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.infra.parallelize import SAVED_OPERATIONS, parallelize_dit_tts
from torchtitan.models.dit_tts.model.attention_backends import attend
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model.packed_attention import packed_attention

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


@pytest.mark.parametrize("replicas", [1, 2])
def test_weights_travel_in_bfloat16_and_gradients_in_float32(replicas):
    seen = []
    with fake_process_group(Layout(replicas, 2)) as dims, Calls() as calls:
        model = parallelized(dims, "--training.mixed_precision_param=bfloat16")
        # FSDP's own hook ran before: what the model sees of its inputs.
        model.register_forward_pre_hook(
            lambda _, args: seen.extend(each.dtype for each in args[:2])
        )
        backward(model)
    assert seen == [torch.float32] * 2  # a time in bfloat16 would be another time
    assert calls.dtypes["c10d::_allgather_base_"] == {torch.bfloat16}
    assert calls.dtypes["c10d::_reduce_scatter_base_"] == {torch.float32}
    assert (calls.dtypes["c10d::allreduce_"] == {torch.float32}) == (replicas > 1)


HEADS, WIDTH = 2, 16
DIM = HEADS * WIDTH


def sdpa(q, k, v):
    return attend(q[None], k[None], v[None], backend="sdpa")[0]


def varlen(q, k, v):
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    return varlen_attn(q, k, v, starts, starts, 8, 8)


def packed(q, k, v):
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    return packed_attention(q, k, v, starts, starts, 8, 8)


class Block(nn.Module):
    """Five products with attention before the last two. (N, DIM) to the same."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.products = nn.ModuleList(
            nn.Linear(DIM, DIM, bias=False, dtype=torch.bfloat16) for _ in range(5)
        )

    def forward(self, x):
        q, k, v = (product(x).unflatten(-1, (HEADS, WIDTH)) for product in self.products[:3])
        x = self.products[3](self.attention(q, k, v).flatten(1))
        return self.products[4](x.relu())


@pytest.mark.parametrize(
    "attention, name",
    [
        (sdpa, "aten::_scaled_dot_product_flash_attention_for_cpu"),
        (varlen, "torch_attn::_varlen_attn"),
        (packed, "dit_tts::attend_samples"),
    ],
)
def test_per_op_checkpointing_saves_attention_and_every_second_product(attention, name):
    calls = {}
    for mode in ("none", "op"):
        with FakeTensorMode(), Calls() as counted:  # flash attention is not run: a CPU has none
            model = nn.Module()
            model.layers = nn.ModuleList([Block(attention)])
            if mode == "op":
                options = ActivationCheckpoint(mode="selective", selective_ac_option="op")
                apply_ac(model, options, op_sac_save_list=SAVED_OPERATIONS)
            x = torch.randn(16, DIM, dtype=torch.bfloat16, requires_grad=True)
            model.layers[0](x).sum().backward()
        calls[mode] = counted.of
    assert calls["none"][name] == calls["op"][name] == 1
    # Of five products the second and the fourth; a backward pass has ten of its own.
    assert calls["none"]["aten::mm"] == 15 and calls["op"]["aten::mm"] == 17
    assert torch.ops.higher_order.flex_attention in SAVED_OPERATIONS

"""Per-op checkpointing keeps what attention gives, by whichever backend, and every second product."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac

from torchtitan.models.dit_tts.infra.parallelize import SAVED_OPERATIONS
from torchtitan.models.dit_tts.model.attention_backends import attend

HEADS, WIDTH = 2, 16
DIM = HEADS * WIDTH


def sdpa(q, k, v):
    return attend(q[None], k[None], v[None])[0]


def varlen(q, k, v):
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    return varlen_attn(q, k, v, starts, starts, 8, 8)


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


class Calls(TorchDispatchMode):
    """Calls of operations, by name."""

    def __init__(self):
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "attention, name",
    [
        (sdpa, "aten::_scaled_dot_product_flash_attention_for_cpu"),
        (varlen, "torch_attn::_varlen_attn"),
    ],
)
def test_attention_runs_once(attention, name):
    options = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    calls = {}
    for mode in ("none", "op"):
        with FakeTensorMode(), Calls() as counted:  # flash attention is not run: a CPU has none
            model = nn.Module()
            model.layers = nn.ModuleList([Block(attention)])
            if mode == "op":
                apply_ac(model, options, op_sac_save_list=SAVED_OPERATIONS)
            x = torch.randn(16, DIM, dtype=torch.bfloat16, requires_grad=True)
            model.layers[0](x).sum().backward()
        calls[mode] = counted.of
    assert calls["none"][name] == calls["op"][name] == 1
    # Of five products the second and the fourth; a backward pass has ten of its own.
    assert calls["none"]["aten::mm"] == 15 and calls["op"]["aten::mm"] == 17


def test_flex_attention_is_kept_too():
    assert torch.ops.higher_order.flex_attention in SAVED_OPERATIONS

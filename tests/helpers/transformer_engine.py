"""A stand-in for TransformerEngine on a CPU: the part of its interface that the product uses, with the demands
that its sources of 2.9 to 2.18 make there, so that a call that fails on a GPU fails here too.

It does not round to fp8, and float64, which the real one lacks, stands for its 2-byte types, so that tests
can compare closely.
"""

import math
import sys
from collections import Counter
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

calls: Counter[str] = Counter()
"""of forward passes by module"""


class Float8CurrentScaling:
    pass


@contextmanager
def autocast(enabled=True, *, recipe):
    assert isinstance(recipe, Float8CurrentScaling)  # others keep a state
    with mock.patch.object(_Product, "fp8", enabled):
        yield


class _Product(torch.autograd.Function):
    fp8 = False

    @staticmethod
    def forward(ctx, weight, x, dtype):
        x, weight = x.to(dtype), weight.to(dtype)
        for operand in (x, weight) if _Product.fp8 else ():
            assert math.prod(operand.shape[:-1]) % 8 == 0 == operand.shape[-1] % 16
        ctx.save_for_backward(x, weight)
        ctx.fp8 = _Product.fp8
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        inputs, gradients = x.flatten(0, -2), gradient.flatten(0, -2)
        # On Hopper: "Leading dimension requirement on A for FP8 GEMM. Caller must pad."
        assert not ctx.fp8 or len(gradients) % 16 == gradients.shape[1] % 16 == 0
        return gradients.t() @ inputs, (gradients @ weight).view_as(x), None


class Linear(nn.Module):
    def __init__(self, in_features, out_features, *, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        assert device == "meta" and not bias
        weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        self.fp8, self.activation_dtype = False, None

    def __setattr__(self, name, value):  # with one of its own FSDP2 sets parameters by it
        super().__setattr__(name, value)

    def get_extra_state(self):
        return torch.ones(9 if self.fp8 else 0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def forward(self, inp):
        calls["Linear"] += 1
        if torch.is_autocast_enabled("cpu"):
            self.activation_dtype = torch.get_autocast_dtype("cpu")
        elif self.activation_dtype != inp.dtype:
            assert all(each.dtype == inp.dtype for each in self.parameters())
            self.activation_dtype = inp.dtype
        self.fp8 = _Product.fp8
        return _Product.apply(self.weight, inp.contiguous(), self.activation_dtype)


class DotProductAttention(nn.Module):
    def __init__(self, heads, width, *, attention_dropout, qkv_format, attn_mask_type):
        super().__init__()
        assert (attention_dropout, qkv_format, attn_mask_type) == (0.0, "thd", "padding")
        assert width % 8 == 0
        self.shape = heads, width

    def forward(self, q, k, v, *, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
        calls["DotProductAttention"] += 1
        assert k.shape == v.shape and q.dtype == k.dtype == v.dtype
        assert q.dtype in (torch.bfloat16, torch.float16, torch.float64)
        assert all(x.shape[1:] == self.shape and x.stride(-1) == 1 for x in (q, k, v))
        assert cu_seqlens_q.shape == cu_seqlens_kv.shape
        for starts, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_kv, max_seqlen_kv)):
            assert starts.dtype == torch.int32 and longest >= starts.diff().max() > 0
        q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
        out = torch.full_like(q, math.nan)  # nobody writes the rows of no sample
        for q0, q1, k0, k1 in zip(q_ends, q_ends[1:], k_ends, k_ends[1:]):
            own = (x.transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
            out[q0:q1] = F.scaled_dot_product_attention(*own).transpose(0, 1)
        return out.flatten(1)


def install() -> None:
    """Lets this process, which no other test may share, import it as `transformer_engine`."""
    # Megatron-Core adapts itself to a TransformerEngine that it finds.
    import torchtitan.models.dit_tts.infra.megatron_layers  # noqa: F401

    members = {"": [], ".common": [], ".common.recipe": [Float8CurrentScaling]}
    members[".pytorch"] = [autocast, Linear, DotProductAttention]
    for name, own in members.items():
        module = sys.modules[f"transformer_engine{name}"] = ModuleType(f"transformer_engine{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__dict__.update({each.__name__: each for each in own})
    sys.modules["transformer_engine"].pytorch = module

"""TransformerEngine's layers on the weights of the plain model. Importing this module imports it, which needs
NVIDIA's GPU. Written for TransformerEngine 2.9 to 2.18; tests run it with a stand-in of the same interface on
a CPU. `tensor_collectives` has the sums of gradients.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import nn
from transformer_engine.common.recipe import Float8CurrentScaling

from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.infra.tensor_collectives import group_of, sum_gradients

_FP8_MULTIPLE = 16
"""Sizes of an fp8 product must be multiples of it: each is the leading dimension of an operand of the product
itself or of its two gradients, and cuBLAS wants 16 bytes there (on Hopper, which transposes operands, also
of the rows)"""


class _Linear(te.Linear):
    """A product of one rank, in fp8 if it is asked for. Scales are of each tensor as it is (current scaling),
    since delayed ones would be a state that no checkpoint has."""

    # With theirs state dicts would have another entry, and loading would miss it in a plain model's.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, fp8: bool):
        require(
            not fp8 or in_features % _FP8_MULTIPLE == out_features % _FP8_MULTIPLE == 0,
            f"[megatron] fp8 = true with a product of {in_features} inputs and {out_features} outputs on a "
            f"GPU, which must be multiples of {_FP8_MULTIPLE}; set it to false, or change [parallelism] "
            f"tensor_parallel_degree",
        )
        # On the meta device theirs draws no values.
        super().__init__(in_features, out_features, bias=False, params_dtype=dtype, device="meta")
        self.fp8_wanted = fp8

    def product(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[:-1].numel()
        if self.fp8_wanted and (missing := -rows % _FP8_MULTIPLE):
            padded = F.pad(x.flatten(0, -2), (0, 0, 0, missing))  # zeros change no scale and no sum
            return self.product(padded)[:rows].unflatten(0, x.shape[:-1])
        with te.autocast(enabled=self.fp8_wanted, recipe=Float8CurrentScaling()):
            return super().forward(x)


class TransformerEngineColumn(_Linear):
    """Column-parallel layer like `MegatronColumn`; without a group it computes the complete product."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None, enters: bool, fp8: bool):
        ranks = group.size() if group is not None else 1
        super().__init__(linear.in_features, linear.out_features // ranks, linear.weight.dtype, fp8)
        self.summed = group_of(group) if group is not None and enters else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.product(x if self.summed is None else sum_gradients(x, self.summed))


class TransformerEngineRow(_Linear):
    """Row-parallel layer like `MegatronRow`; without a group it computes the complete product."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None, fp8: bool):
        ranks = group.size() if group is not None else 1
        super().__init__(linear.in_features // ranks, linear.out_features, linear.weight.dtype, fp8)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = self.product(x)
        return y if self.group is None else reduce_from_tensor_model_parallel_region(y, self.group)


def packed_attention_kernel(n_heads: int, head_dim: int) -> Callable[..., torch.Tensor]:
    """TransformerEngine's attention with the arguments of `varlen_attn`. n_heads: this rank's."""
    attention = te.DotProductAttention(
        n_heads, head_dim, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding"
    )

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_starts: torch.Tensor,
        k_starts: torch.Tensor,
        q_max: int,
        k_max: int,
    ) -> torch.Tensor:
        lengths = {"cu_seqlens_q": q_starts, "cu_seqlens_kv": k_starts}
        rows = attention(q, k, v, **lengths, max_seqlen_q=q_max, max_seqlen_kv=k_max)
        return rows.view_as(q)

    return kernel

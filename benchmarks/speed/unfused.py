"""The same model with each product by itself: q, k, v, gate; gate, up; text and speaker k, v; AdaLN's twelve.

Weights are copied out of the fused layers, so both builds compute the same function.
"""

from copy import deepcopy
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.dit_tts.model.attention import GatedAttention, JointAttention
from torchtitan.models.dit_tts.model.layers import GatedMLP
from torchtitan.models.dit_tts.model.model import DiTTTSModel, LowRankAdaLN


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A layer with a copy of these values; weight (out, in)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach().clone().contiguous())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def _by_head(fused: nn.Linear, parts: int, head_dim: int) -> nn.ModuleList:
    """Layers of a product whose rows lie head by head, part by part within a head."""
    rows = fused.weight.unflatten(0, (-1, parts, head_dim))
    return nn.ModuleList(_linear(rows[:, part].flatten(0, 1)) for part in range(parts))


class SeparateAdaLN(nn.Module):
    """`LowRankAdaLN` of twelve products: down and up of shift, scale, gate of attention and MLP."""

    def __init__(self, fused: LowRankAdaLN):
        super().__init__()
        rank, dim = fused.rank, fused.down.in_features
        down = fused.down.weight.view(3, 2, rank, dim)
        up, bias = fused.up.weight.view(3, 2, dim, rank), fused.up.bias.view(3, 2, dim)
        places = [(kind, half) for kind in range(3) for half in range(2)]
        self.down = nn.ModuleList(_linear(down[place]) for place in places)
        self.up = nn.ModuleList(_linear(up[place], bias[place]) for place in places)

    def forward(self, shared: torch.Tensor) -> torch.Tensor:
        parts = [
            up(down(F.silu(shared[:, index // 2]))) + shared[:, index // 2]
            for index, (down, up) in enumerate(zip(self.down, self.up, strict=True))
        ]
        return torch.stack(parts, 1).unflatten(1, (3, 2))


def _split_heads(self: GatedAttention, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v, gate = (part(x).unflatten(-1, (-1, self.head_dim)) for part in self.parts)
    return self.q_norm(q), self.k_norm(k), v, gate


def _condition_key_values(self: JointAttention, text: torch.Tensor, speaker: torch.Tensor):
    pairs = []
    for parts, source in ((self.text_parts, text), (self.speaker_parts, speaker)):
        k, v = (part(source).unflatten(-1, (-1, self.head_dim)) for part in parts)
        pairs.append((self.k_norm(k), v))
    return tuple(pairs)


def _mlp(self: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.silu(self.gate(x)) * self.up(x))


def unfused(model: DiTTTSModel) -> DiTTTSModel:
    """A copy of the model with separate products and the same values."""
    model = deepcopy(model)
    for module in list(model.modules()):
        if isinstance(module, GatedAttention):
            module.parts = _by_head(module.qkv_gate, 4, module.head_dim)
            del module.qkv_gate
            module.split_heads = MethodType(_split_heads, module)
        if isinstance(module, JointAttention):
            module.text_parts = _by_head(module.text_kv, 2, module.head_dim)
            module.speaker_parts = _by_head(module.speaker_kv, 2, module.head_dim)
            del module.text_kv, module.speaker_kv
            module.condition_key_values = MethodType(_condition_key_values, module)
        if isinstance(module, GatedMLP):
            module.gate, module.up = (_linear(module.gate_up.weight[part::2]) for part in range(2))
            del module.gate_up
            module.forward = MethodType(_mlp, module)
    for layer in model.layers:
        layer.adaln = SeparateAdaLN(layer.adaln)
    return model

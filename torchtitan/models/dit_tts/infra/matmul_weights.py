"""The large matmuls of the decoder, whose weights Muon updates and which fp8 computes."""

from typing import cast

from torch import nn

from torchtitan.models.dit_tts.model.attention import JointAttention
from torchtitan.models.dit_tts.model.layers import GatedMLP


def weight_of(linear: nn.Module) -> nn.Parameter:
    """The parameter itself, of which a layer under tensor parallelism shows its own part."""
    return dict(linear.named_parameters(recurse=False))["weight"]


def matmul_weights(model: nn.Module) -> dict[nn.Linear, tuple[int, int]]:
    """The projections of attention and MLP in every block, without the low-rank AdaLN.

    Returns:
        For each the complete layout of the fused matrices in its rows: (parts, rows), `rows` of each part in turn.
    """
    products: dict[nn.Linear, tuple[int, int]] = {}
    for module in cast(nn.ModuleList, model.layers).modules():
        if isinstance(module, JointAttention):
            head = module.head_dim
            products[module.qkv_gate] = (4, head)
            products[module.text_kv] = products[module.speaker_kv] = (2, head)
            products[module.out] = (1, weight_of(module.out).shape[0])
        elif isinstance(module, GatedMLP):
            products[module.gate_and_up] = (2, module.block)
            products[module.down] = (1, weight_of(module.down).shape[0])
    return products

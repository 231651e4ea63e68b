"""The large matmuls of the decoder: what Muon updates, fp8 computes, tensor parallelism splits and LoRA adapts."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from torchtitan.models.dit_tts.model.attention import JointAttention
from torchtitan.models.dit_tts.model.layers import GatedMLP


def weight_of(linear: nn.Module) -> nn.Parameter:
    """The parameter itself; under tensor parallelism `linear.weight` is this rank's part."""
    return dict(linear.named_parameters(recurse=False))["weight"]


def projections(model: nn.Module) -> Iterator[tuple[nn.Module, str, int, int]]:
    """The projections of attention and MLP in every block, without the low-rank AdaLN.

    Yields:
        (module, name of the Linear in it, parts, rows): number of matrices that are fused in its rows, and
        rows of each in turn. A Linear of one part leads out of the module, the others lead into it.
    """
    for module in cast(nn.ModuleList, model.layers).modules():
        if isinstance(module, JointAttention):
            yield module, "qkv_gate", 4, module.head_dim
            yield module, "text_kv", 2, module.head_dim
            yield module, "speaker_kv", 2, module.head_dim
            yield module, "out", 1, 1
        elif isinstance(module, GatedMLP):
            yield module, "gate_and_up", 2, module.block
            yield module, "down", 1, 1


def matmul_weights(model: nn.Module) -> dict[nn.Linear, tuple[int, int]]:
    """(parts, rows) of each of the `projections`."""
    return {
        getattr(module, name): (parts, rows) for module, name, parts, rows in projections(model)
    }


def split_fused(weight: torch.Tensor, parts: int, rows: int) -> torch.Tensor:
    """Separates the matrices of a fused projection, which has `rows` rows of each in turn.

    (groups · parts · rows, columns) to (parts, groups · rows, columns).
    """
    return weight.unflatten(0, (-1, parts, rows)).transpose(0, 1).flatten(1, 2)


def join_fused(matrices: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of `split_fused`."""
    return matrices.unflatten(1, (-1, rows)).transpose(0, 1).flatten(0, 2)

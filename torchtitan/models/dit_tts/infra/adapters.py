"""Adapters of [lora]: trained low-rank updates of the decoder's projections over a frozen model.

A low-rank update (LoRA; Hu et al. 2021, arXiv 2106.09685) of a matrix W is W + alpha / rank · B A. The matrices that
are fused in one projection (q, k, v and gate; gate and up) have an update each. It is computed by a hook of the layer,
so the layer keeps its class, its weight and its name, and whatever loads or splits these does so as before.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.dit_tts.config.job_config import Lora
from torchtitan.models.dit_tts.infra.matmul_weights import projections

_A, _B = "lora_a", "lora_b"


@dataclass
class LowRank:
    """Computation of a layer's update from `lora_a` (parts · rank, in) and `lora_b` (out, rank)."""

    parts: int
    """matrices that are fused in the layer"""

    rows: int
    """of each of them in turn"""

    scale: float


def add_adapter(model: nn.Module, options: Lora) -> None:
    """Freezes the model and gives it the parameters that are trained. Their values come with the model's."""
    if not options.rank:
        return
    model.requires_grad_(False)
    # Else the first block, whose input nothing trains, would be compiled to a graph of its own.
    model.get_submodule("input").register_forward_hook(lambda *call: call[-1].requires_grad_())
    scale = options.alpha / options.rank
    for _, layer, parts, rows in _layers(model):
        new = partial(torch.empty, dtype=layer.weight.dtype, device=layer.weight.device)
        a, b = _shapes(layer, parts, options.rank)
        layer.lora_a, layer.lora_b = nn.Parameter(new(a)), nn.Parameter(new(b))
        layer.low_rank = LowRank(parts, rows, scale)
        layer.register_forward_hook(_add_update)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any, int, int]]:
    """(full name, layer, parts, rows) of the `projections`."""
    names = {id(module): name for name, module in model.named_modules()}
    for module, name, parts, rows in projections(model):
        layer = getattr(module, name)
        yield names[id(layer)], layer, parts, rows


def _shapes(layer: nn.Linear, parts: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of `lora_a` and `lora_b`."""
    out, width = layer.weight.shape
    return (parts * rank, width), (out, rank)


def _add_update(layer: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    x, how = args[0], layer.low_rank
    low = F.linear(x, layer.lora_a.to(x.dtype))
    b = layer.lora_b.to(low.dtype)
    if how.parts == 1:
        return output + how.scale * F.linear(low, b)
    low = low.unflatten(-1, (how.parts, -1))
    b = b.unflatten(0, (-1, how.parts, how.rows))
    each = [F.linear(low[..., part, :], b[:, part].flatten(0, 1)) for part in range(how.parts)]
    update = torch.stack([one.unflatten(-1, (-1, how.rows)) for one in each], dim=-2).flatten(-3)
    return output + how.scale * update


def is_trained(name: str) -> bool:
    """True if an adapter's run trains, and saves, the parameter of this name."""
    return name.endswith((f".{_A}", f".{_B}"))


def adapter_shapes(model: nn.Module, rank: int) -> dict[str, tuple[int, int]]:
    """Shapes of all that an adapter of the plain model has, by full names."""
    return {
        f"{name}.{each}": shape
        for name, layer, parts, _ in _layers(model)
        for each, shape in zip((_A, _B), _shapes(layer, parts, rank), strict=True)
    }


@torch.no_grad()
def merge(model: nn.Module, values: Mapping[str, torch.Tensor], scale: float) -> None:
    """Adds low-rank updates to the plain model's weights. `values`: `lora_a` and `lora_b` of every projection by their
    full names; `scale`: alpha / rank."""
    for name, layer, parts, rows in _layers(model):
        a, b = (values[f"{name}.{each}"].to(layer.weight.device).float() for each in (_A, _B))
        a, b = a.unflatten(0, (parts, -1)), b.unflatten(0, (-1, parts, rows))
        update = torch.einsum("gpnr,pri->gpni", b, a).flatten(0, 2)
        layer.weight.copy_(layer.weight + scale * update)


def whole_updates(
    model: nn.Module, values: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The updates of a layer's fused matrices as a single one of the layer: A (parts · rank, in) and B (out, parts ·
    rank), in whose rows of one matrix the columns of the others are 0. By the layer's full name; `values` as of `merge`."""
    found = {}
    for name, _, parts, rows in _layers(model):
        a, b = (values[f"{name}.{each}"] for each in (_A, _B))
        own = torch.eye(parts, dtype=b.dtype)[:, None, :, None]
        wide = b.unflatten(0, (-1, parts, rows))[..., None, :] * own
        found[name] = a, wide.flatten(0, 2).flatten(1)
    return found

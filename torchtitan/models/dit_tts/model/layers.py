"""Building blocks shared by the decoder and the encoders."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from torchtitan.models.dit_tts.model.operations import WithOperations
from torchtitan.models.dit_tts.streams import Stream


class RMSNorm(WithOperations):
    """RMSNorm with a weight over the last dimension."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operations(x).rms_norm(x, self.weight, self.eps)


class HeadWeights(nn.Module):
    """The weights (H, K) of a norm over a head's channels, separate for each head (QKNorm)."""

    def __init__(self, n_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_heads, head_dim))


class GatedMLP(WithOperations):
    """silu(gate) * up, then down, without biases. (..., D) to (..., D).

    Gate and up are one matmul. Its rows are in blocks, each of some units' gates and then their ups: tensor
    parallelism, which splits the rows into equal parts, keeps each pair together if its degree divides the
    number of blocks, which is the greatest common divisor of `hidden_dim` and `n_blocks` (the heads).
    """

    def __init__(self, dim: int, hidden_dim: int, n_blocks: int):
        super().__init__()
        self.block = hidden_dim // math.gcd(hidden_dim, n_blocks)
        self.gate_and_up = nn.Linear(dim, 2 * hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_and_up(x).unflatten(-1, (-1, 2, self.block))
        return self.down(self.operations(both).silu_mul(both).flatten(-2))


def embedding(tokens: int, dim: int) -> nn.Embedding:
    """nn.Embedding; on the meta device without its initial values, whose code imports the compiler, a second of a
    start."""
    table = torch.empty(tokens, dim)
    if table.is_meta:
        return nn.Embedding.from_pretrained(table, freeze=False)
    return nn.Embedding(tokens, dim)


def timestep_embedding(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Sinusoidal embedding of diffusion time. t (B,) in [0, 1] to (B, dim) float32.

    Frequencies 1000·exp(-ln(10000)·i/(dim/2)); cosines first, then sines.
    """
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device=t.device) / half
    frequencies = 1000.0 * torch.exp(-math.log(10000.0) * exponent)
    angles = t.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def positions_of(x: torch.Tensor, packed: Stream | None = None) -> torch.Tensor:
    """0, 1, ... of x (B, L, ...), (L,) float32; (1, L) of samples packed in one row, each from 0."""
    if packed is not None:
        return packed.position[None].float()
    return torch.arange(x.shape[1], dtype=torch.float32, device=x.device)


def rope_table(
    positions: torch.Tensor, head_dim: int, theta: float, rotated: Sequence[bool] = (True,)
) -> torch.Tensor:
    """Rotary angles (Su et al. 2021) in the layout of `apply_rope`, (2, ..., L, G, 1, head_dim) float32.

    Channels (i, i + head_dim/2) turn by position·theta^(-2i/head_dim) in the G groups of heads that
    are `rotated`, and by zero in the others. The first entry is each channel's cosine, the second
    its sine, negative in the first half. `positions`: (..., L) float32.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None] * theta**-exponent
    angles = torch.stack(
        [angles if turns else torch.zeros_like(angles) for turns in rotated], dim=-2
    )
    cos, sin = angles.cos(), angles.sin()
    halves = torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])
    return halves[..., None, :]

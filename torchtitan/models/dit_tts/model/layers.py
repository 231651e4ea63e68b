"""Building blocks shared by the decoder and the encoders."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.dit_tts.model import cpu_kernels
from torchtitan.models.dit_tts.streams import Stream, per_position


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm without weight over the last dimension, computed in float32, in x's dtype."""
    return F.rms_norm(cpu_kernels.upcast(x), (x.shape[-1],), None, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019) with a weight, computed in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if cpu_kernels.use_cpu_kernels(x):
            return cpu_kernels.scaled_norm(x, self.weight, None, self.eps)
        return (rms_norm(cpu_kernels.upcast(x), self.eps) * cpu_kernels.upcast(self.weight)).to(
            x.dtype
        )


def modulated_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    packed: Stream | None = None,
) -> torch.Tensor:
    """RMSNorm of x (B, T, D), times 1 + scale, plus shift, both (B, 1, D); (S, 1, D) of the samples that are
    `packed` in one row."""
    if cpu_kernels.use_cpu_kernels(x):
        return cpu_kernels.scaled_norm(x, 1 + scale, shift, eps, packed and packed.starts)
    if packed is not None:
        scale, shift = per_position(scale, packed), per_position(shift, packed)
    return rms_norm(x, eps) * (1 + scale) + shift


def add_gated(
    x: torch.Tensor, gate: torch.Tensor, update: torch.Tensor, packed: Stream | None = None
) -> torch.Tensor:
    """x + gate·update, (B, T, D) with a gate (B, 1, D), or (S, 1, D) as for `modulated_norm`."""
    if cpu_kernels.use_cpu_kernels(x):
        return cpu_kernels.add_scaled(x, gate, update, packed and packed.starts)
    return x + (gate if packed is None else per_position(gate, packed)) * update


class HeadRMSNorm(nn.Module):
    """RMSNorm over a head's channels, with a separate weight for each head (QKNorm).

    (B, L, H, K) to the same shape.
    """

    def __init__(self, n_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_heads, head_dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (rms_norm(cpu_kernels.upcast(x), self.eps) * cpu_kernels.upcast(self.weight)).to(
            x.dtype
        )


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    """silu(gate)·up for (..., 2, F) = (gate, up). Returns (..., F)."""
    if cpu_kernels.use_cpu_kernels(both):
        return cpu_kernels.silu_mul(both)
    if torch.compiler.is_compiling() and not both.is_cpu:
        return silu_mul_for_triton(both)
    gate, up = both.unbind(-2)
    return F.silu(gate) * up


def silu_mul_for_triton(both: torch.Tensor) -> torch.Tensor:
    """`silu_mul` in the form of which Inductor makes the faster kernels on a GPU."""
    # The gradients of unbind are concatenated, by a kernel that computes both for each number and drops one. Those
    # of selects are added, and share what they read and compute. The sigmoid takes fewer instructions than SiLU.
    gate, up = cpu_kernels.upcast(both.select(-2, 0)), both.select(-2, 1)
    return (gate * torch.sigmoid(gate)).to(up.dtype) * up


class GatedMLP(nn.Module):
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
        return self.down(silu_mul(both).flatten(-2))


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


def apply_rope(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotates channel i with channel i + K/2 in float32. x (B, L, H, K), rope (2, L, G, 1, K), or
    (2, B, L, G, 1, K) where positions differ between rows."""
    # Swapping the halves instead of splitting them, and rotating the other heads by zero, lets the
    # compiler fuse all of it into one kernel, forward and backward. Halves and not neighbours, the other
    # common order of the channels: a CPU's vector units cannot swap neighbours.
    cos, sin = rope.unbind(0)
    grouped = cpu_kernels.upcast(x).unflatten(2, (rope.shape[-3], -1))
    swapped = grouped.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (grouped * cos + swapped * sin).flatten(2, 3).to(x.dtype)

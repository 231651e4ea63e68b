"""Building blocks shared by the decoder and the encoders."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm without weight over the last dimension, computed in float32, in x's dtype."""
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019) with a weight, computed in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (rms_norm(x.float(), self.eps) * self.weight.float()).to(x.dtype)


class HeadRMSNorm(nn.Module):
    """RMSNorm over the head's channels with a weight of its own for each head (QKNorm).

    (B, L, H, K) to the same shape.
    """

    def __init__(self, n_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_heads, head_dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (rms_norm(x.float(), self.eps) * self.weight.float()).to(x.dtype)


class GatedMLP(nn.Module):
    """silu(gate) * up, then down, without biases. (..., D) to (..., D).

    Gate and up are one product whose rows alternate (gate 0, up 0, gate 1, ...), so that a cut of
    the rows into equal parts, as tensor parallelism makes, keeps each pair together.
    """

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(F.silu(gate) * up)


def timestep_embedding(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Sinusoidal embedding of diffusion time. t (B,) in [0, 1] to (B, dim) float32.

    Frequencies 1000·exp(-ln(10000)·i/(dim/2)); cosines first, then sines.
    """
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device=t.device) / half
    frequencies = 1000.0 * torch.exp(-math.log(10000.0) * exponent)
    angles = t.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rope_table(length: int, head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Rotary angles' cosines and sines, (2, length, head_dim / 2) float32 (Su et al. 2021)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions[:, None] * theta**-exponent
    return torch.stack([angles.cos(), angles.sin()])


def apply_rope(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotates interleaved channel pairs. x (B, L, H, K), rope (2, L, K/2); float32 inside."""
    cos, sin = rope[:, None, :, None, :].unbind(0)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return rotated.flatten(-2).to(x.dtype)

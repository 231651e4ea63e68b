"""The pointwise parts of a block, by name. These are the definitions; `infra/kernels.py` puts other
implementations in their place, which take the same arguments."""

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.dit_tts.streams import Stream, per_position


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Converts x to the dtype of computation: float32, or float64 if it has that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm without weight over the last dimension, computed in float32, in x's dtype."""
    return F.rms_norm(upcast(x), (x.shape[-1],), None, eps).to(x.dtype)


def apply_rope(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotates channel i with channel i + K/2 in float32. x (B, L, H, K), rope (2, L, G, 1, K), or
    (2, B, L, G, 1, K) where positions differ between rows."""
    # Swapping the halves instead of splitting them, and rotating the other heads by zero, lets the
    # compiler fuse all of it into one kernel, forward and backward. Halves and not neighbours, the other
    # common order of the channels: a CPU's vector units cannot swap neighbours.
    cos, sin = rope.unbind(0)
    grouped = upcast(x).unflatten(2, (rope.shape[-3], -1))
    swapped = grouped.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (grouped * cos + swapped * sin).flatten(2, 3).to(x.dtype)


class Operations:
    @staticmethod
    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich 2019) of x over its last dimension, computed in float32, times weight."""
        return (_normed(upcast(x), eps) * upcast(weight)).to(x.dtype)

    @staticmethod
    def modulated_norm(
        x: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        packed: Stream | None = None,
    ) -> torch.Tensor:
        """RMSNorm of x (B, T, D), times 1 + scale, plus shift, both (B, 1, D); (S, 1, D) of the samples that are
        `packed` in one row."""
        if packed is not None:
            scale, shift = per_position(scale, packed), per_position(shift, packed)
        return _normed(x, eps) * (1 + scale) + shift

    @staticmethod
    def add_gated(
        x: torch.Tensor, gate: torch.Tensor, update: torch.Tensor, packed: Stream | None = None
    ) -> torch.Tensor:
        """x + gate·update, (B, T, D) with a gate (B, 1, D), or (S, 1, D) as for `modulated_norm`."""
        return x + (gate if packed is None else per_position(gate, packed)) * update

    @classmethod
    def gated_norm(
        cls,
        x: torch.Tensor,
        update: torch.Tensor | None,
        gate: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        packed: Stream | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`add_gated`, or x where there is no update, and its `modulated_norm`."""
        if update is not None and gate is not None:
            x = cls.add_gated(x, gate, update, packed)
        return x, cls.modulated_norm(x, scale, shift, eps, packed)

    @staticmethod
    def normed_heads(
        x: torch.Tensor, weights: tuple[torch.Tensor, ...], rope: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, ...]:
        """The parts of a fused projection x (B, L, H, P, K), each (B, L, H, K). The first of them, one for each of
        the weights (H, K), are normed over K, multiplied by their weight and rotated by rope, a `rope_table`
        or None."""
        parts = list(x.unbind(-2))
        for index, weight in enumerate(weights):
            normed = Operations.rms_norm(parts[index], weight, eps)
            parts[index] = normed if rope is None else apply_rope(normed, rope)
        return tuple(parts)

    @staticmethod
    def silu_mul(both: torch.Tensor) -> torch.Tensor:
        """silu(gate)·up for (..., 2, F) = (gate, up). Returns (..., F)."""
        gate, up = both.unbind(-2)
        return F.silu(gate) * up

    @staticmethod
    def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x·sigmoid(gate), both of one shape."""
        return x * torch.sigmoid(gate)


class WithOperations(nn.Module):
    """A module that computes by operations that can be replaced."""

    @staticmethod
    def operations(x: torch.Tensor) -> type[Operations]:
        """The implementation for a tensor like x."""
        return Operations

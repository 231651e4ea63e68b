"""Attention of the decoder (joint over self, text and speaker keys) and of the encoders."""

import math

import torch
from torch import nn

from torchtitan.models.dit_tts.model.attention_backends import JointKeys, attend, attend_within
from torchtitan.models.dit_tts.model.layers import HeadWeights
from torchtitan.models.dit_tts.model.operations import WithOperations
from torchtitan.models.dit_tts.streams import Stream

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one stream, each (B, L, H, K)."""


class GatedAttention(WithOperations):
    """Projections shared by the two kinds of attention.

    Q, K, V and the gate of the output are one matmul, laid out head by head (q, k, v, gate), so that
    tensor parallelism splits its rows between heads.
    """

    def __init__(self, dim: int, n_heads: int, eps: float):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = dim // n_heads
        self.qkv_gate = nn.Linear(dim, 4 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.q_norm = HeadWeights(n_heads, self.head_dim)
        self.k_norm = HeadWeights(n_heads, self.head_dim)
        self.eps = eps

    def split_heads(self, x: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Q, K (normed and rotated), V and gate of x, each (B, L, H, K)."""
        parts = self.qkv_gate(x).unflatten(-1, (-1, 4, self.head_dim))
        weights = self.q_norm.weight, self.k_norm.weight
        return self.operations(parts).normed_heads(parts, weights, rope, self.eps)

    def project_out(self, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.out(self.operations(attended).sigmoid_mul(attended, gate).flatten(-2))


class SelfAttention(GatedAttention):
    """Self-attention of the encoders: all heads are rotated. (B, L, D) to (B, L, D)."""

    def __init__(self, dim: int, n_heads: int, eps: float, backend: str):
        super().__init__(dim, n_heads, eps)
        self.backend = backend

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        packed: Stream | None = None,
    ) -> torch.Tensor:
        """`packed` samples in one row attend within themselves, without a mask."""
        q, k, v, gate = self.split_heads(x, rope)
        if packed is not None:
            return self.project_out(attend_within(q, k, v, packed, causal), gate)
        return self.project_out(attend(q, k, v, mask, causal, self.backend), gate)


def rotated_groups(n_heads: int, ranks: int = 1, rank: int = 0) -> tuple[bool, ...]:
    """True for each group of a rank's heads that is rotated: the first half of all heads are, rounded down. There are as few
    groups of equal size as possible, so an odd number of heads needs one group per head."""
    own = n_heads // ranks
    rotated = min(max(n_heads // 2 - rank * own, 0), own)
    size = math.gcd(rotated, own)
    return (True,) * (rotated // size) + (False,) * ((own - rotated) // size)


class JointAttention(GatedAttention):
    """One softmax over the keys [self ‖ text ‖ speaker]; queries come from the frames only.

    K and V of text and speaker depend on the conditions alone, so a sampler computes them once
    (`condition_key_values`) and passes them at every step.
    """

    def __init__(self, dim: int, n_heads: int, text_dim: int, speaker_dim: int, eps: float):
        super().__init__(dim, n_heads, eps)
        self.text_kv = nn.Linear(text_dim, 2 * dim, bias=False)
        self.speaker_kv = nn.Linear(speaker_dim, 2 * dim, bias=False)

    def _key_value(self, kv: torch.Tensor, rope: torch.Tensor | None = None) -> KeyValue:
        parts = kv.unflatten(-1, (-1, 2, self.head_dim))
        weights = (self.k_norm.weight,)
        k, v = self.operations(parts).normed_heads(parts, weights, rope, self.eps)
        return k, v

    def condition_key_values(
        self, text: torch.Tensor, speaker: torch.Tensor, text_rope: torch.Tensor | None
    ) -> tuple[KeyValue, KeyValue]:
        """text (B, L, c), speaker (B, P, s). `text_rope`, a `rope_table`, rotates the text's keys if they have
        positions."""
        text_key_value = self._key_value(self.text_kv(text), text_rope)
        return text_key_value, self._key_value(self.speaker_kv(speaker))

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor,
        keys: JointKeys,
        conditions: tuple[KeyValue, KeyValue],
    ) -> torch.Tensor:
        """x (B, T, D) to the same shape; `keys` tells which of the T + L + P keys are valid."""
        q, k, v, gate = self.split_heads(x, rope)
        (text_k, text_v), (speaker_k, speaker_v) = conditions
        attended = keys.attend(q, (k, text_k, speaker_k), (v, text_v, speaker_v))
        return self.project_out(attended, gate)

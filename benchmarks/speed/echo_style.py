"""A plain PyTorch build of an Echo-style DiT, for comparison: the same sizes, nothing arranged for speed.

One linear layer a product, complex-number RoPE, K and V concatenated in every block, a dense
(B, 1, T, K) mask, AdaLN's projections one by one in every block. Its parameters are as many as those of
`DiTTTSModel` with the same sizes and a learned text encoder, and its arguments are the same.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs


class PlainNorm(nn.Module):
    """RMSNorm with a weight of `shape`, over the last dimension, in float32."""

    def __init__(self, shape: int | tuple[int, int], eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        as_float = x.float()
        normed = as_float * torch.rsqrt(as_float.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


def rotations(length: int, head_dim: int, theta: float) -> torch.Tensor:
    """(length, head_dim / 2) complex64."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x (B, L, H, K)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    """Self-attention, gated; with `context_dim` joint with text and speaker keys."""

    def __init__(self, dim: int, n_heads: int, eps: float, context_dim: int = 0):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.q, self.k, self.v, self.gate, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(5)
        )
        if context_dim:
            self.text_k, self.text_v, self.speaker_k, self.speaker_v = (
                nn.Linear(context_dim, dim, bias=False) for _ in range(4)
            )
        self.q_norm = PlainNorm((n_heads, self.head_dim), eps)
        self.k_norm = PlainNorm((n_heads, self.head_dim), eps)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], self.n_heads, self.head_dim)

    def forward(
        self,
        x: torch.Tensor,
        turns: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool = False,
        text: torch.Tensor | None = None,
        speaker: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = self.q_norm(self.heads(self.q(x))), self.heads(self.k(x)), self.heads(self.v(x))
        k = self.k_norm(k)
        rotated = self.n_heads if text is None else self.n_heads // 2
        q = torch.cat([rotate(q[:, :, :rotated], turns), q[:, :, rotated:]], dim=2)
        k = torch.cat([rotate(k[:, :, :rotated], turns), k[:, :, rotated:]], dim=2)
        if text is not None and speaker is not None:
            text_k, speaker_k = self.heads(self.text_k(text)), self.heads(self.speaker_k(speaker))
            text_v, speaker_v = self.heads(self.text_v(text)), self.heads(self.speaker_v(speaker))
            k = torch.cat([k, self.k_norm(text_k), self.k_norm(speaker_k)], dim=1)
            v = torch.cat([v, text_v, speaker_v], dim=1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
        )
        out = out.transpose(1, 2).reshape(x.shape)
        return self.out(out * torch.sigmoid(self.gate(x)))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class AdaLN(nn.Module):
    """Modulated norm and gate: x (B, T, D) and the shared (B, 3·D) to h and gate."""

    def __init__(self, dim: int, rank: int, eps: float):
        super().__init__()
        self.eps = eps
        self.down = nn.ModuleList(nn.Linear(dim, rank, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(rank, dim) for _ in range(3))

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = shared[:, None].chunk(3, dim=-1)
        shift, scale, gate = (
            up(down(F.silu(part))) + part
            for down, up, part in zip(self.down, self.up, parts, strict=True)
        )
        as_float = x.float()
        normed = as_float * torch.rsqrt(as_float.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + scale) + shift).to(x.dtype), torch.tanh(gate)


class Block(nn.Module):
    def __init__(self, args: DiTTTSModelArgs):
        super().__init__()
        self.attention_adaln = AdaLN(args.dim, args.adaln_rank, args.norm_eps)
        self.attention = Attention(args.dim, args.n_heads, args.norm_eps, args.speaker_dim)
        self.mlp_adaln = AdaLN(args.dim, args.adaln_rank, args.norm_eps)
        self.mlp = MLP(args.dim, args.mlp_dim)

    def forward(self, x, shared, turns, mask, text, speaker) -> torch.Tensor:
        h, gate = self.attention_adaln(x, shared)
        x = x + gate * self.attention(h, turns, mask, text=text, speaker=speaker)
        h, gate = self.mlp_adaln(x, shared)
        return x + gate * self.mlp(h)


class Encoder(nn.Module):
    """Pre-norm blocks and a norm. (B, L, D) to (B, L, D)."""

    def __init__(
        self, dim: int, n_layers: int, n_heads: int, mlp_dim: int, theta: float, eps: float
    ):
        super().__init__()
        self.head_dim, self.theta = dim // n_heads, theta
        self.attention_norms = nn.ModuleList(PlainNorm(dim, eps) for _ in range(n_layers))
        self.attentions = nn.ModuleList(Attention(dim, n_heads, eps) for _ in range(n_layers))
        self.mlp_norms = nn.ModuleList(PlainNorm(dim, eps) for _ in range(n_layers))
        self.mlps = nn.ModuleList(MLP(dim, mlp_dim) for _ in range(n_layers))
        self.norm = PlainNorm(dim, eps)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
        turns = rotations(x.shape[1], self.head_dim, self.theta)
        for norm, attention, mlp_norm, mlp in zip(
            self.attention_norms, self.attentions, self.mlp_norms, self.mlps, strict=True
        ):
            x = x + attention(norm(x), turns, mask, causal)
            x = x + mlp(mlp_norm(x))
        return self.norm(x)


class EchoStyleDiT(nn.Module):
    """See the top of the file; arguments and result as of `DiTTTSModel.forward`."""

    def __init__(self, args: DiTTTSModelArgs):
        super().__init__()
        self.args = args
        theta, eps, c = args.rope_theta, args.norm_eps, args.speaker_dim
        self.text_embedding = nn.Embedding(args.text_vocab_size, args.text_dim)
        self.text_encoder = Encoder(
            args.text_dim,
            args.text_n_layers,
            args.text_n_heads,
            11 * args.text_dim // 4,
            theta,
            eps,
        )
        self.text_input, self.text_norm = nn.Linear(args.text_dim, c), PlainNorm(c, eps)
        self.speaker_input = nn.Linear(args.latent_channels * args.speaker_patch_size, c)
        self.speaker_encoder = Encoder(
            c, args.speaker_n_layers, args.speaker_n_heads, args.speaker_mlp_dim, theta, eps
        )
        self.timestep = nn.Sequential(
            nn.Linear(args.timestep_dim, args.dim, bias=False),
            nn.SiLU(),
            nn.Linear(args.dim, args.dim, bias=False),
            nn.SiLU(),
            nn.Linear(args.dim, 3 * args.dim, bias=False),
        )
        self.input = nn.Linear(args.latent_channels, args.dim)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm, self.output = PlainNorm(args.dim, eps), nn.Linear(args.dim, args.latent_channels)

    def forward(
        self,
        latents,
        t,
        frame_mask,
        text_ids,
        text_mask,
        speaker,
        speaker_mask,
        keep_text,
        keep_speaker,
    ) -> torch.Tensor:
        args = self.args
        text = self.text_encoder(
            self.text_embedding(text_ids),
            text_mask[:, None, None, :].expand(-1, 1, text_ids.shape[1], -1),
            False,
        )
        text = self.text_norm(self.text_input(text))
        patches = speaker.reshape(len(speaker), -1, args.speaker_patch_size * args.latent_channels)
        speaker = self.speaker_encoder(self.speaker_input(patches), None, True)
        speaker_mask = speaker_mask[:, :: args.speaker_patch_size]
        half = args.timestep_dim // 2
        frequencies = 1000 * torch.exp(-math.log(10000.0) * torch.arange(half) / half)
        angles = t[:, None] * frequencies
        shared = self.timestep(torch.cat([angles.cos(), angles.sin()], dim=-1))
        keys = torch.cat(
            [frame_mask, text_mask & keep_text[:, None], speaker_mask & keep_speaker[:, None]],
            dim=1,
        )
        mask = keys[:, None, None, :].expand(-1, 1, latents.shape[1], -1).contiguous()
        turns = rotations(latents.shape[1], args.dim // args.n_heads, args.rope_theta)
        x = self.input(latents)
        for block in self.blocks:
            x = block(x, shared, turns, mask, text, speaker)
        return self.output(self.norm(x))

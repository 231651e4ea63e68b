"""The learned encoders of speaker latents and of text."""

import torch
from torch import nn

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.attention import SelfAttention
from torchtitan.models.dit_tts.model.layers import (
    GatedMLP,
    RMSNorm,
    embedding,
    positions_of,
    rope_table,
)
from torchtitan.models.dit_tts.streams import Stream


class EncoderBlock(nn.Module):
    """Pre-norm block: gated self-attention, gated MLP. (B, L, D) to (B, L, D)."""

    def __init__(self, args: DiTTTSModelArgs, dim: int, n_heads: int, mlp_dim: int):
        super().__init__()
        self.attention_norm = RMSNorm(dim, args.norm_eps)
        self.attention = SelfAttention(dim, n_heads, args.norm_eps, args.attention)
        self.mlp_norm = RMSNorm(dim, args.norm_eps)
        self.mlp = GatedMLP(dim, mlp_dim, n_heads)

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        packed: Stream | None = None,
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope, mask, causal, packed)
        return x + self.mlp(self.mlp_norm(x))


class SpeakerEncoder(nn.Module):
    """Reference latents to decoder keys: (B, S, C) and mask (B, S) to (B, P, D) and mask (B, P).

    P = ceil(S / patch), and one more for the mean of a bidirectional encoder. Causal attention is not changed by
    padding on the right; the other masks it. A patch is valid if any of its frames is, or only if all are
    (`speaker_partial_patches`). Samples that are packed in one row begin with a patch each.
    """

    def __init__(self, args: DiTTTSModelArgs):
        super().__init__()
        dim, n_heads = args.speaker_dim, args.speaker_n_heads
        self.patch_size = args.speaker_patch_size
        self.partial_patches = args.speaker_partial_patches
        self.bidirectional = args.speaker_bidirectional
        self.head_dim = dim // n_heads
        self.rope_theta = args.rope_theta
        self.input = nn.Linear(args.latent_channels * self.patch_size, dim)
        self.layers = nn.ModuleList(
            EncoderBlock(args, dim, n_heads, args.speaker_mlp_dim)
            for _ in range(args.speaker_n_layers)
        )
        self.norm = RMSNorm(dim, args.norm_eps)

    def forward(
        self, latents: torch.Tensor, mask: torch.Tensor, packed: Stream | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        missing = -latents.shape[1] % self.patch_size
        latents = nn.functional.pad(latents * mask[..., None], (0, 0, 0, missing))
        mask = nn.functional.pad(mask, (0, missing))
        patches = latents.unflatten(1, (-1, self.patch_size)).flatten(2)
        in_patch = mask.unflatten(1, (-1, self.patch_size))
        valid = in_patch.any(-1) if self.partial_patches else in_patch.all(-1)
        x = self.input(patches.to(self.input.weight.dtype))
        rope = rope_table(positions_of(x, packed), self.head_dim, self.rope_theta)
        keys = _attendable(valid) if self.bidirectional else None
        for layer in self.layers:
            x = layer(x, rope, keys, not self.bidirectional, packed)
        x = self.norm(x)
        return _with_mean(x, valid) if self.bidirectional else (x, valid)


def _attendable(mask: torch.Tensor) -> torch.Tensor:
    """The mask (B, L) for attention, (B, 1, 1, L). Position 0 is always a valid key: nothing valid would
    otherwise give an empty softmax."""
    keys = mask.clone()
    keys[:, 0] = True
    return keys[:, None, None, :]


def _with_mean(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, P, D) and mask (B, P) with the mean of the valid positions before them, valid if any is. Before, as valid
    keys come first: see `attention_backends.guided_keys`."""
    count = mask.sum(1, keepdim=True)
    total = torch.where(mask[..., None], x, 0.0).sum(1, keepdim=True)
    mean = total / count.clamp(min=1)[..., None].to(x.dtype)
    return torch.cat([mean, x], dim=1), torch.cat([count > 0, mask], dim=1)


class ByteEncoder(nn.Module):
    """Learned encoder of texts or captions: ids (B, L) and mask (B, L) to features (B, L, D).

    Features at padded positions are undefined; the decoder masks them. `sizes`: number of ids, blocks, D, heads and
    hidden width of the MLP.
    """

    def __init__(self, args: DiTTTSModelArgs, *sizes: int):
        super().__init__()
        n_ids, n_layers, dim, n_heads, mlp_dim = sizes
        self.head_dim = dim // n_heads
        self.rope_theta = args.rope_theta
        self.embedding = embedding(n_ids, dim)
        self.layers = nn.ModuleList(
            EncoderBlock(args, dim, n_heads, mlp_dim) for _ in range(n_layers)
        )
        self.norm = RMSNorm(dim, args.norm_eps)

    def forward(
        self, text_ids: torch.Tensor, mask: torch.Tensor, packed: Stream | None = None
    ) -> torch.Tensor:
        x = self.embedding(text_ids)
        rope = rope_table(positions_of(x, packed), self.head_dim, self.rope_theta)
        keys = _attendable(mask)
        for layer in self.layers:
            x = layer(x, rope, keys, False, packed)
        return self.norm(x)

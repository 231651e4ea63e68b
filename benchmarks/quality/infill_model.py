"""A diffusion transformer that fills in masked frames of speech, after the paper of F5-TTS.

Chen et al. 2024, "F5-TTS: A Fairytaler that Fakes Fluent and Faithful Speech with Flow Matching"
(arXiv 2410.06885), section 3 and figure 1, in code of our own, at a size that compares with the
debug flavor. There is no speaker encoder and no attention to text: characters, padded with a filler token
to the number of frames, pass ConvNeXt-V2 blocks (Woo et al. 2023) and are concatenated frame by frame with
the noisy frames and with those that are given.

Times are the package's: 1 is noise and 0 is data. The paper's run the other way.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.protocols.model import ModelProtocol

from torchtitan.models.dit_tts.model.attention_backends import attend
from torchtitan.models.dit_tts.model.layers import apply_rope, rope_table, timestep_embedding
from torchtitan.models.dit_tts.text.vocabulary import END_ID, PAD_ID

FILLER_ID = PAD_ID
"""Id at frames behind the last character, and at all frames of a text that is dropped"""


@dataclass(frozen=True)
class InfillSizes:
    """Sizes at which the model has the debug flavor's parameters, 3 % more or less (a test counts them).

    Proportions are the paper's base model's: a feed-forward of twice the width, four text blocks of half
    the width or a little more, heads of 64 channels. There is no dropout: a CPU spends a sixth of the step on
    drawing it, and no run here is long enough to need it.
    """

    dim: int = 192
    n_layers: int = 6
    n_heads: int = 3
    mlp_ratio: int = 2
    text_dim: int = 144
    text_n_layers: int = 4
    time_dim: int = 256
    position_kernel: int = 31
    position_groups: int = 16


SIZES = InfillSizes()


def characters(text_ids: torch.Tensor) -> torch.Tensor:
    """Ids (B, L) of the package's tokenizer, `begin text end padding`, to (B, L - 1) of the characters
    alone, then filler."""
    ids = text_ids[:, 1:]
    return torch.where(ids == END_ID, FILLER_ID, ids)


class ResponseNorm(nn.Module):
    """Global response normalization: (B, T, D), each channel by its norm over the frames."""

    def __init__(self, dim: int):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))
        self.shift = nn.Parameter(torch.empty(dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)
        nn.init.zeros_(self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x.float(), dim=1, keepdim=True)
        share = (norm / (norm.mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + x * share * self.scale.to(x.dtype) + self.shift.to(x.dtype)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution over seven frames, then a pointwise MLP with response normalization."""

    def __init__(self, dim: int):
        super().__init__()
        self.mix = nn.Conv1d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up = nn.Linear(dim, 2 * dim)
        self.response = ResponseNorm(2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """x (B, T, D), valid (B, T, 1) in its dtype, 0 at padding, which stays zero."""
        h = self.mix(x.mT).mT
        h = F.gelu(self.up(self.norm(h))) * valid
        return x + self.down(self.response(h)) * valid


class FrameText(nn.Module):
    """Characters (B, L) to a feature for each frame, (B, T, text_dim)."""

    def __init__(self, vocab_size: int, sizes: InfillSizes):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, sizes.text_dim)
        self.layers = nn.ModuleList(
            ConvNeXtBlock(sizes.text_dim) for _ in range(sizes.text_n_layers)
        )

    def forward(
        self, ids: torch.Tensor, frame_mask: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        frames = frame_mask.shape[1]
        ids = F.pad(ids[:, :frames], (0, max(0, frames - ids.shape[1])), value=FILLER_ID)
        if keep is not None:
            ids = torch.where(keep[:, None], ids, FILLER_ID)
        x = self.embedding(ids)
        valid = frame_mask[..., None].to(x.dtype)
        # The frames' numbers as sinusoids, which are those of a diffusion time of frame / 1000.
        places = torch.arange(frames, device=ids.device) / 1000
        x = (x + timestep_embedding(places, x.shape[-1]).to(x.dtype)) * valid
        for layer in self.layers:
            x = layer(x, valid)
        return x


class InfillBlock(nn.Module):
    """Self-attention of all frames and a feed-forward, each with its shift, scale and gate of the time."""

    def __init__(self, sizes: InfillSizes):
        super().__init__()
        dim = sizes.dim
        self.n_heads = sizes.n_heads
        self.modulation = nn.Linear(dim, 6 * dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, sizes.mlp_ratio * dim)
        self.down = nn.Linear(sizes.mlp_ratio * dim, dim)

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """x (B, T, D), time (B, D), mask (B, 1, 1, T) additive."""
        shift, scale, gate = self.modulation(time)[:, None].unflatten(-1, (2, 3, -1)).unbind(-2)
        h = _modulated(x, scale[..., 0, :], shift[..., 0, :])
        q, k, v = self.qkv(h).unflatten(-1, (3, self.n_heads, -1)).unbind(-3)
        attended = attend(apply_rope(q, rope), apply_rope(k, rope), v, mask)
        x = x + gate[..., 0, :] * self.out(attended.flatten(-2))
        h = _modulated(x, scale[..., 1, :], shift[..., 1, :])
        h = self.down(F.gelu(self.up(h), approximate="tanh"))
        return x + gate[..., 1, :] * h


def _modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    normed = F.layer_norm(x, (x.shape[-1],), eps=1e-6)
    return (normed * (1 + scale) + shift).to(x.dtype)


class InfillModel(ModelProtocol):
    """Predicts the velocity ε - x0 of every frame from noisy frames, given frames and text.

    Args:
        args: sizes of the debug flavor, of which the latents' width and the number of ids count.
    """

    def __init__(self, args: Any, sizes: InfillSizes = SIZES):
        super().__init__(args)
        self.args, self.sizes = args, sizes
        dim, channels = sizes.dim, args.latent_channels
        self.text_encoder = self.speaker_encoder = None
        """what the trainer looks for"""
        self.text = FrameText(args.text_vocab_size, sizes)
        self.input = nn.Linear(2 * channels + sizes.text_dim, dim)
        kernel = sizes.position_kernel
        self.position = nn.Conv1d(
            dim, dim, kernel, padding=kernel // 2, groups=sizes.position_groups
        )
        self.time = nn.Sequential(
            nn.Linear(sizes.time_dim, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU()
        )
        self.layers = nn.ModuleList(InfillBlock(sizes) for _ in range(sizes.n_layers))
        self.modulation = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, channels)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """PyTorch's own initial values by its seed; AdaLN and the output are zero, so that every block
        begins as the identity and the network predicts zero."""
        for module in self.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        layers: Any = self.layers
        for linear in [self.modulation, self.output, *(layer.modulation for layer in layers)]:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(
        self,
        noisy: torch.Tensor,
        t: torch.Tensor,
        frame_mask: torch.Tensor,
        given: torch.Tensor,
        ids: torch.Tensor,
        keep_text: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Velocity (B, T, C) float32 of every frame.

        Args:
            noisy: (B, T, C).
            t: (B,) in [0, 1], 1 is noise.
            frame_mask: (B, T) bool, true at frames of the row.
            given: (B, T, C) clean frames, zero at those to fill in.
            ids: (B, L) as of `characters`.
            keep_text: (B,) bool, false drops the text; None keeps all.
        """
        dtype = self.input.weight.dtype
        text = self.text(ids, frame_mask, keep_text)
        x = self.input(torch.cat([noisy.to(dtype), given.to(dtype), text.to(dtype)], dim=-1))
        x = x * frame_mask[..., None].to(x.dtype)
        x = x + F.gelu(self.position(x.mT)).mT.to(x.dtype)
        time = self.time(timestep_embedding(t, self.sizes.time_dim).to(dtype))
        head = self.sizes.dim // self.sizes.n_heads
        rope = rope_table(torch.arange(x.shape[1], device=x.device).float(), head, 10000.0)
        # No softmax is empty: a row without frames attends to all.
        mask = frame_mask | ~frame_mask.any(dim=1, keepdim=True)
        additive = torch.zeros(mask.shape, dtype=x.dtype, device=x.device)
        additive = additive.masked_fill_(~mask, -math.inf)[:, None, None]
        for layer in self.layers:
            x = layer(x, time, rope, additive)
        shift, scale = self.modulation(time)[:, None].chunk(2, dim=-1)
        return self.output(_modulated(x, scale, shift)).float()

"""The duration predictor: text and speaker to the number of latent frames of the utterance.

Each token takes a positive number of frames, and the utterance their sum, also beyond the lengths of the training
data. The prediction is a logarithm, so an error of one tenth counts alike in short and long texts.
"""

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.conditions import ConditionedModel, Conditions
from torchtitan.models.dit_tts.model.layers import GatedMLP, RMSNorm
from torchtitan.models.dit_tts.model.operations import WithOperations

NEIGHBOURS = 3
"""Tokens on each side that a block sees"""


class DurationBlock(WithOperations):
    """A convolution over neighbouring tokens, then a gated MLP: x (B, L, D) and voice (B, c) to (B, L, D).

    The voice scales and shifts the normed tokens, since it decides how long each letter takes. mask (B, L) is
    false at padding, which no token sees.
    """

    def __init__(self, args: DiTTTSModelArgs):
        super().__init__()
        self.eps = args.norm_eps
        self.voice = nn.Linear(args.speaker_dim, 2 * args.dim, bias=False)
        self.near = nn.Parameter(torch.empty(args.dim, 2 * NEIGHBOURS + 1))
        self.mlp = GatedMLP(args.dim, args.mlp_dim, args.n_heads)

    def forward(self, x: torch.Tensor, voice: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scale, shift = self.voice(voice)[:, None].chunk(2, dim=-1)
        h = self.operations(x).modulated_norm(x, scale, shift, self.eps) * mask[..., None]
        padded = F.pad(h, (0, 0, NEIGHBOURS, NEIGHBOURS))
        near = self.near.to(h.dtype).unbind(1)
        shifted = (padded[:, n : n + x.shape[1]] * weight for n, weight in enumerate(near))
        return x + self.mlp(sum(shifted, torch.zeros_like(h)))


class DurationModel(ConditionedModel):
    """log Σ exp(log frames of each token), from the encoded text and the mean of the encoded speaker and caption, or
    zero without them. It trains in place of `DiTTTSModel`, so `denoise` has the same arguments.
    """

    def __init__(self, args: DiTTTSModelArgs):
        super().__init__(args)
        self.input = nn.Linear(args.text_key_dim, args.dim)
        self.layers = nn.ModuleList(DurationBlock(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, 1)

    def denoise(
        self,
        latents: torch.Tensor,
        t: torch.Tensor,
        frame_mask: torch.Tensor,
        conditions: Conditions,
        keep_text: torch.Tensor | None = None,
        keep_speaker: torch.Tensor | None = None,
        keep_caption: torch.Tensor | None = None,
        packed: None = None,
    ) -> torch.Tensor:
        """`log_frames`, which does not depend on the utterance."""
        return DurationModel.log_frames(self, conditions, keep_speaker, keep_caption)

    def log_frames(
        self,
        conditions: Conditions,
        keep_speaker: torch.Tensor | None = None,
        keep_caption: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(B,) float32: logarithm of the latent frames. `keep_speaker`, `keep_caption`: (B,) bool, false hides
        that condition; None keeps all.
        """
        mask = conditions.text_mask.clone()
        mask[:, 0] = True  # the sum over an empty text needs a term
        _, *kept = conditions.kept((None, keep_speaker, keep_caption))
        spoken = torch.cat(kept, dim=1)
        voice = torch.where(spoken[..., None], conditions.speaker, 0.0).sum(1)
        voice = voice / spoken.sum(1, keepdim=True).clamp(min=1)
        x = self.input(conditions.text)
        for layer in self.layers:
            x = layer(x, voice.to(x.dtype), mask)
        log_frames = self.output(self.norm(x)).squeeze(-1).float()
        return log_frames.where(mask, -torch.inf).logsumexp(1)

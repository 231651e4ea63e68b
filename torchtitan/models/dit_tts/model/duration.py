"""The duration predictor: text and speaker to the number of latent frames of the utterance.

Each token takes a positive number of frames, and the utterance takes their sum: a text twice as long takes
about twice as long, also beyond the lengths of the training data. The logarithm is what is predicted, as an
error of one tenth weighs alike in a short and in a long text.
"""

import torch
from torch import nn

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.conditions import ConditionedModel, Conditions
from torchtitan.models.dit_tts.model.encoders import EncoderBlock
from torchtitan.models.dit_tts.model.layers import RMSNorm, positions_of, rope_table


class DurationModel(ConditionedModel):
    """log Σ exp(frames' logarithm of each token), from the encoded text with the mean of the encoded speaker
    added to every token. A row without a speaker gets nothing added.

    It is trained in the place of `DiTTTSModel`, so `forward` and `denoise` take the same arguments.
    """

    def __init__(self, args: DiTTTSModelArgs):
        super().__init__(args)
        self.input = nn.Linear(args.speaker_dim, args.dim)
        self.voice = nn.Linear(args.speaker_dim, args.dim, bias=False)
        self.layers = nn.ModuleList(
            EncoderBlock(args.dim, args.n_heads, args.mlp_dim, args.norm_eps, args.attention)
            for _ in range(args.n_layers)
        )
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
    ) -> torch.Tensor:
        """`log_frames`: nothing of the utterance itself is read."""
        return DurationModel.log_frames(self, conditions, keep_speaker)

    def log_frames(
        self, conditions: Conditions, keep_speaker: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(B,) float32: logarithm of the latent frames.

        Args:
            keep_speaker: (B,) bool, false hides the speaker; None keeps all.
        """
        args, mask = self.args, conditions.text_mask.clone()
        mask[:, 0] = True  # an empty text: the softmax needs a key, the sum a term
        spoken = conditions.speaker_mask
        if keep_speaker is not None:
            spoken = spoken & keep_speaker[:, None]
        speaker = torch.where(spoken[..., None], conditions.speaker, 0.0).sum(1)
        speaker = speaker / spoken.sum(1, keepdim=True).clamp(min=1)
        x = self.input(conditions.text) + self.voice(speaker.to(conditions.text.dtype))[:, None]
        rope = rope_table(positions_of(x), args.dim // args.n_heads, args.rope_theta)
        for layer in self.layers:
            x = layer(x, rope, mask[:, None, None, :], False)
        log_frames = self.output(self.norm(x)).squeeze(-1).float()
        return log_frames.where(mask, -torch.inf).logsumexp(1)

    def forward(
        self,
        latents: torch.Tensor,
        t: torch.Tensor,
        frame_mask: torch.Tensor,
        text_ids: torch.Tensor,
        text_mask: torch.Tensor,
        speaker: torch.Tensor,
        speaker_mask: torch.Tensor,
        keep_text: torch.Tensor | None = None,
        keep_speaker: torch.Tensor | None = None,
        text_features: torch.Tensor | None = None,
        text_rows: object = None,
        text_places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`log_frames` of conditions that are not encoded yet; see `encode_conditions` for the arguments."""
        conditions = ConditionedModel.encode_conditions(
            self, text_ids, text_mask, speaker, speaker_mask, text_features, text_rows
        )
        return DurationModel.log_frames(self, conditions, keep_speaker)

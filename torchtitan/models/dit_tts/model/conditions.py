"""The encoders of text, speaker and caption with which every network of the family begins, and initial weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.encoders import ByteEncoder, SpeakerEncoder
from torchtitan.models.dit_tts.model.initialization import initialize
from torchtitan.models.dit_tts.model.layers import RMSNorm, embedding
from torchtitan.models.dit_tts.streams import PackedStreams, Stream, valid_mask
from torchtitan.protocols.model import ModelProtocol


@dataclass(frozen=True)
class Conditions:
    """Encoded text, speaker and caption of a batch, from which the decoder's keys and values are computed."""

    text: torch.Tensor
    """(B, L, c)"""

    text_mask: torch.Tensor
    """(B, L) bool"""

    speaker: torch.Tensor
    """(B, P, s), or (B, P + C, s) with the caption behind the reference"""

    speaker_mask: torch.Tensor
    """(B, P) bool"""

    text_positions: torch.Tensor | None = None
    """(B, L) float32: position of each token's middle in the speech, in (0, 1); -1 for tokens that
    are not text. For [model] text_positions = "aligned" only"""

    caption_mask: torch.Tensor | None = None
    """(B, C) bool, (1, S·C) of S packed samples; None of a model without captions"""

    @property
    def masks(self) -> tuple[torch.Tensor, ...]:
        """Masks of text, speaker and, where the model takes one, caption."""
        caption = () if self.caption_mask is None else (self.caption_mask,)
        return self.text_mask, self.speaker_mask, *caption

    def kept(
        self, keep: Sequence[torch.Tensor | None], packed: PackedStreams | None = None
    ) -> list[torch.Tensor]:
        """`masks` without the rows, or `packed` samples, for which `keep` (B,) of the condition is false; None keeps
        all."""
        streams: Sequence[Stream | None] = (None,) * len(keep) if packed is None else packed[1:]
        found = []
        for mask, of_mask, stream in zip(self.masks, keep, streams):
            if of_mask is not None:
                # A model without references has no patches.
                at = None if stream is None else stream.segment[: mask.shape[1]]
                mask = mask & (of_mask[:, None] if at is None else of_mask[at])
            found.append(mask)
        return found


def condition_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch's inputs of the network other than noisy latents, as arguments of `encode_conditions`. Training, validation,
    samples, distillation and generation all read their batches here, so that none lacks what another has."""
    text, speaker = batch["text_ids"], batch["speaker"]
    packed: PackedStreams | None = batch["packed"]
    if packed is None:
        text_mask = valid_mask(batch["text_tokens"], text.shape[1])
        speaker_mask = valid_mask(batch["speaker_frames"], speaker.shape[1])
    else:
        text_mask = valid_mask(packed.text.starts[-1:], text.shape[1])
        # Of the last patch of a sample some frames may be missing.
        patch = torch.arange(speaker.shape[1], device=speaker.device)
        size = len(patch) // len(packed.patches.segment)
        segment, position = (each[patch // size] for each in packed.patches[:2])
        speaker_mask = (position * size + patch % size < batch["speaker_frames"][segment])[None]
    found = {}
    if (caption := batch.get("caption_ids")) is not None:
        mask = valid_mask(batch["caption_tokens"], caption.shape[1])
        found = {"caption_ids": caption, "caption_mask": mask}
    return {
        **found,
        "text_ids": text,
        "text_mask": text_mask,
        "speaker": speaker,
        "speaker_mask": speaker_mask,
        "text_features": batch.get("text_features"),
        "text_rows": batch["text_rows"],
        "text_positions": batch["text_positions"],
        "packed": packed,
    }


class ConditionedModel(ModelProtocol):
    denoise: Callable[..., torch.Tensor]
    """(latents, t, frame_mask, conditions, keep_text, keep_speaker, keep_caption, packed) to the output of `forward`"""

    def __init__(self, args: DiTTTSModelArgs):
        super().__init__(args)
        self.args = args
        # A pretrained one has the interface of `text.text_encoder.PretrainedTextEncoder`.
        self.text_encoder: Any = None
        if args.text_vocab_size:
            size = args.text_dim, args.text_n_heads, args.text_mlp_width
            self.text_encoder = ByteEncoder(args, args.text_vocab_size, args.text_n_layers, *size)
        elif args.text_encoder is not None:
            self.text_encoder = args.text_encoder()
        self.condition_embedding = (
            embedding(args.condition_tokens, args.text_dim) if args.condition_tokens else None
        )
        self.text_input: nn.Module = nn.Identity()
        self.text_norm: nn.Module = nn.Identity()
        if args.text_projection:
            self.text_input = nn.Linear(args.text_dim, args.speaker_dim)
            self.text_norm = RMSNorm(args.speaker_dim, args.norm_eps)
        self.speaker_encoder = SpeakerEncoder(args) if args.speaker_reference else None
        self.caption_encoder: ByteEncoder | None = None
        if args.max_caption_tokens:
            sizes = args.caption_vocab_size, args.caption_n_layers
            as_wide = args.speaker_dim, args.speaker_n_heads, args.speaker_mlp_dim
            self.caption_encoder = ByteEncoder(args, *sizes, *as_wide)
        # Sharding replaces it by a function that writes a rank's part of a full value.
        self.write_parameter: Callable[[nn.Parameter, torch.Tensor], Any] = torch.Tensor.copy_

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Draws every parameter from (torch's seed, its name), alike on any layout of ranks. A pretrained text
        encoder loads the weights of its own checkpoint."""
        encoder = self.text_encoder
        pretrained = None if isinstance(encoder, ByteEncoder) else encoder
        skip = pretrained.parameters() if pretrained is not None else ()
        initialize(self, self.args.n_layers, torch.initial_seed(), self.write_parameter, skip)
        if pretrained is None:
            return
        if self.args.text_encoder_starts:
            pretrained.load_weights(self.write_parameter)
        else:
            for parameter in pretrained.parameters():
                parameter.fill_(math.nan)  # a weight that no checkpoint fills must show
            pretrained.reset_buffers()
        if buffer_device is not None:
            pretrained.move_buffers(buffer_device)

    def encode_conditions(
        self,
        text_ids: torch.Tensor,
        text_mask: torch.Tensor,
        speaker: torch.Tensor,
        speaker_mask: torch.Tensor,
        text_features: torch.Tensor | None = None,
        text_rows: Any = None,
        text_positions: torch.Tensor | None = None,
        packed: PackedStreams | None = None,
        caption_ids: torch.Tensor | None = None,
        caption_mask: torch.Tensor | None = None,
    ) -> Conditions:
        """Encodes text, speaker and caption.

        Args:
            text_ids, text_mask: (B, L), the mask true where there is a token.
            speaker, speaker_mask: (B, S, C) and (B, S), true where there is a frame.
            text_features: (B, L, text_dim) of an encoder outside the model.
            text_rows: packing of the texts for a pretrained encoder inside the model.
            text_positions: as in `Conditions`.
            packed: where the samples are that stand in one row, B = 1.
            caption_ids, caption_mask: (B, C), for a model that takes captions; (S, C) of packed samples.
        """
        text = self._text_features(text_ids, text_mask, text_features, text_rows, packed)
        if self.args.text_projection:
            text = text.to(cast(nn.Linear, self.text_input).weight.dtype)
        text = self.text_norm(self.text_input(text))
        if self.speaker_encoder is not None:
            patches = packed and packed.patches
            speaker, speaker_mask = self.speaker_encoder(speaker, speaker_mask, patches)
        else:
            speaker = text.new_zeros(len(text), 0, self.args.speaker_dim)
            speaker_mask = speaker_mask[:, :0]
        if self.caption_encoder is not None:
            assert caption_ids is not None and caption_mask is not None
            caption = self.caption_encoder(caption_ids, caption_mask)
            caption = caption.reshape(len(text), -1, self.args.speaker_dim)
            caption_mask = caption_mask.reshape(len(text), -1)
            speaker = torch.cat([speaker, caption.to(speaker.dtype)], dim=1)
        else:
            caption_mask = None
        return Conditions(text, text_mask, speaker, speaker_mask, text_positions, caption_mask)

    def forward(
        self,
        latents: torch.Tensor,
        t: torch.Tensor,
        frame_mask: torch.Tensor,
        keep_text: torch.Tensor | None = None,
        keep_speaker: torch.Tensor | None = None,
        keep_caption: torch.Tensor | None = None,
        packed: PackedStreams | None = None,
        **conditions: Any,
    ) -> torch.Tensor:
        """Predicts the target of the objective for every frame; a duration model the utterances' lengths.

        Args:
            latents: (B, T, C) noisy latents.
            t: (B,) time in [0, 1], 1 is noise.
            frame_mask: (B, T) bool, true at frames of the utterance.
            keep_text, keep_speaker, keep_caption: (B,) bool, false hides that condition; None keeps all.
            packed: where samples are that stand one behind the other in a single row, B = 1. Then t,
                keep_text and keep_speaker are of the samples, (S,).
            conditions: the other arguments of `encode_conditions`.

        Returns:
            (B, T, C) float32, undefined at masked frames; of a duration model (B,).
        """
        # FSDP wraps these methods of the instance, so that samplers can call them alone. Here the weights are
        # gathered already, so the plain functions of the class are called.
        encoded = ConditionedModel.encode_conditions(self, packed=packed, **conditions)
        return type(self).denoise(
            self, latents, t, frame_mask, encoded, keep_text, keep_speaker, keep_caption, packed
        )

    def _text_features(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        features: torch.Tensor | None,
        rows: Any,
        packed: PackedStreams | None,
    ) -> torch.Tensor:
        """(B, L, text_dim): features of the text, and learned embeddings of conditioning tokens."""
        if isinstance(self.text_encoder, ByteEncoder):
            features = self.text_encoder(ids, mask, packed and packed.text)
        elif self.text_encoder is not None:
            in_text = mask & (ids < self.args.first_condition_id)
            features = self.text_encoder(ids, in_text, rows)
        assert features is not None
        if self.condition_embedding is None:
            return features
        condition = ids - self.args.first_condition_id
        own = self.condition_embedding(condition.clamp_min(0))
        return torch.where((condition >= 0)[..., None], own, features.to(own.dtype))

"""Text and a speaker's reference to latents: the model, the guidance and the solver in one call."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan.models.dit_tts.flow.counter_rng import normal, stream_keys
from torchtitan.models.dit_tts.flow.guidance import Guidance
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.flow.solvers import euler, linear_times
from torchtitan.models.dit_tts.model.model import Conditions, DiTTTSModel
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer

# Apart from training's streams: generation must not start from a noise that was trained on.
SAMPLING_STREAM = 100


@dataclass(frozen=True)
class SpeechRequest:
    """One utterance to generate."""

    text: str
    reference: torch.Tensor
    """(R, C) latents of the speaker; (0, C) for no particular one"""

    frames: int
    """length to generate, in latent frames"""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """values of the conditioning tokens, under the names that a sample's JSON has"""

    def noise_row(self) -> int:
        """Number that keys the request's noise beside the seed: of what is said, not of its place in a
        batch, nor of its length or reference, which may differ by a rounding."""
        content = json.dumps([self.text, str(self.metadata.get("speaker", ""))])
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "little")


def pad_stack(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (L_i, ...) to (B, max L, ...) padded with zeros, and the mask (B, max L)."""
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return padded, torch.arange(padded.shape[1])[None] < lengths[:, None]


def _tile(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """(B, ...) -> (times * B, ...)"""
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))


@torch.no_grad()
def generate_latents(
    model: DiTTTSModel,
    tokenizer: ConditionedTokenizer,
    objective: FlowMatching,
    requests: list[SpeechRequest],
    guidance: Guidance,
    steps: int,
    seed: int,
    device: torch.device,
    text_encoder: PretrainedTextEncoder | None = None,
    cache_key_values: bool = True,
) -> list[torch.Tensor]:
    """Latents (frames, C) float32 on the CPU for each request, as one batch.

    The noise of a request is keyed by the seed and the request, so that its result does not depend on
    the others of its batch. Conditions are encoded once, and their K and V serve all steps.

    Args:
        text_encoder: the frozen one of a model that has none inside.
        cache_key_values: False computes K and V at every step: the blocks of a sharded model are
            gathered only while they run.
    """
    text, text_mask = pad_stack(
        [torch.tensor(tokenizer.encode(r.text, r.metadata)) for r in requests]
    )
    speaker, speaker_mask = pad_stack([r.reference.float() for r in requests])
    if not speaker.shape[1]:  # no request has a reference
        speaker = speaker.new_zeros(len(requests), 1, model.args.latent_channels)
        speaker_mask = torch.zeros(len(requests), 1, dtype=torch.bool)
    lengths = torch.tensor([r.frames for r in requests], device=device)
    frames = int(lengths.max())
    frame_mask = torch.arange(frames, device=device)[None] < lengths[:, None]
    text, text_mask, speaker, speaker_mask = (
        tensor.to(device) for tensor in (text, text_mask, speaker, speaker_mask)
    )
    features = None
    if text_encoder is not None:
        features = text_encoder(text, text_mask & (text < model.args.condition_base))
    conditions = model.encode_conditions(text, text_mask, speaker, speaker_mask, features)
    key_values = {1: model.condition_key_values(conditions) if cache_key_values else None}
    repeated = {1: conditions}

    def network(
        latents: torch.Tensor, t: float, keep_text: torch.Tensor, keep_speaker: torch.Tensor
    ) -> torch.Tensor:
        times = len(latents) // len(requests)
        if times not in repeated:
            c = conditions
            tensors = (c.text, c.text_mask, c.speaker, c.speaker_mask)
            repeated[times] = Conditions(*(_tile(tensor, times) for tensor in tensors))
            key_values[times] = key_values[1] and [
                (
                    (_tile(text_key, times), _tile(text_value, times)),
                    (_tile(speaker_key, times), _tile(speaker_value, times)),
                )
                for (text_key, text_value), (speaker_key, speaker_value) in key_values[1]
            ]
        t_batch = torch.full((len(latents),), t, device=device)
        output = model.denoise(
            latents,
            t_batch,
            frame_mask.repeat(times, 1),
            repeated[times],
            keep_text,
            keep_speaker,
            key_values[times],
        )
        return objective.velocity(output, latents, t_batch, smallest_step=1.0 / steps)

    rows = torch.tensor([request.noise_row() for request in requests], device=device)
    keys = stream_keys(seed, torch.tensor(0, device=device), rows, SAMPLING_STREAM)
    noise = normal(keys, (frames, model.args.latent_channels))
    latents = euler(lambda x, t: guidance.velocity(network, x, t), noise, linear_times(steps))
    return [row[: request.frames].cpu() for row, request in zip(latents, requests)]

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
from torchtitan.models.dit_tts.flow.solvers import euler
from torchtitan.models.dit_tts.model.attention_backends import GuidedKeys, guided_keys
from torchtitan.models.dit_tts.model.model import BlockCache, DiTTTSModel
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
    cache_blocks: bool = True,
) -> list[torch.Tensor]:
    """Latents (frames, C) float32 on the CPU for each request, as one batch.

    The noise of a request is keyed by the seed and the request, so that its result does not depend on
    the others of its batch. Conditions are encoded once; their K and V serve all steps and branches of
    guidance, and what depends on the time alone is computed for all steps at once. The network runs in
    the dtype of the model's weights, the solver in float32.

    Args:
        text_encoder: the frozen one of a model that has none inside.
        cache_blocks: False computes these at every step: the blocks of a sharded model are gathered
            only while they run.
    """
    text, text_mask = pad_stack(
        [torch.tensor(tokenizer.encode(r.text, r.metadata)) for r in requests]
    )
    places = torch.from_numpy(tokenizer.places(text.numpy(), text_mask.numpy()))
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
    conditions = model.encode_conditions(
        text, text_mask, speaker, speaker_mask, features, text_places=places.to(device)
    )
    times = objective.schedule(steps)
    caches: dict[float, list[BlockCache]] = {}
    if cache_blocks:
        inner = torch.tensor(times[:-1], device=device)
        caches = dict(zip(times, model.block_caches(conditions, inner, lengths), strict=False))

    dtype = conditions.text.dtype
    masks = (frame_mask, conditions.text_mask, conditions.speaker_mask)
    keys: dict[tuple[tuple[bool, bool], ...], GuidedKeys] = {}

    def network(
        latents: torch.Tensor, t: float, copies: tuple[tuple[bool, bool], ...]
    ) -> torch.Tensor:
        if copies not in keys:
            keys[copies] = guided_keys(*masks, copies, dtype)
        one_time = torch.full((1,), t, device=device)
        cache = caches.get(t)
        output = model.denoise_guided(latents, one_time, keys[copies], conditions, lengths, cache)
        return objective.velocity(output, latents, one_time, smallest_step=1.0 / steps)

    rows = torch.tensor([request.noise_row() for request in requests], device=device)
    noise_keys = stream_keys(seed, torch.tensor(0, device=device), rows, SAMPLING_STREAM)
    noise = normal(noise_keys, (frames, model.args.latent_channels))
    latents = euler(lambda x, t: guidance.velocity(network, x, t), noise, times)
    return [row[: request.frames].cpu() for row, request in zip(latents, requests)]

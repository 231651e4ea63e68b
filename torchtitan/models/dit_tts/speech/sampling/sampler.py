"""Sampling of latents, or of a predicted length, from text and a speaker's reference."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from torchtitan.models.dit_tts.config.job_config import JobConfig, Sampling
from torchtitan.models.dit_tts.flow.counter_rng import normal, stream_keys
from torchtitan.models.dit_tts.flow.guidance import guided_velocity, rescaled_velocity
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.flow.solvers import SOLVERS, Step, first_way, integrate, plan_steps
from torchtitan.models.dit_tts.model.attention_backends import GuidedKeys, guided_keys
from torchtitan.models.dit_tts.model.conditions import (
    ConditionedModel,
    Conditions,
    condition_inputs,
)
from torchtitan.models.dit_tts.model.duration import DurationModel
from torchtitan.models.dit_tts.model.model import BlockCache, DiTTTSModel
from torchtitan.models.dit_tts.streams import valid_mask
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer

# Apart from training's streams: generation must not start from a noise that was trained on.
SAMPLING_STREAM = 100


_SILENT_RMS, _SILENT_FRAMES = 0.3, 20
"""so many latents below it in a row are padding: latents of speech have an RMS near 1, padding is 0 with the model's
error"""


@dataclass(frozen=True)
class SpeechRequest:
    """One utterance to generate."""

    text: str
    reference: torch.Tensor
    """(R, C) latents of the speaker; (0, C) for no particular one"""

    frames: int = 0
    """length to generate, in latent frames"""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """values of the conditioning tokens, and the caption, under the names that a sample's JSON has"""

    until: int = 0
    """so many of the frames, from the first on, are generated; 0: all"""

    known: torch.Tensor | None = None
    """(K, C) latents of the first frames, which are continued"""

    def noise_row(self) -> int:
        """Number that keys the request's noise, in addition to the seed. It depends on the content, not
        on the position in a batch, the length or the reference, which may differ by a rounding."""
        content = json.dumps([self.text, str(self.metadata.get("speaker", ""))])
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "little")


def _padded(rows: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (L_i, ...) to (B, max L, ...) padded with zeros, at least one position long, and their lengths (B,)."""
    stacked = torch.nn.utils.rnn.pad_sequence(
        [*rows, rows[0].new_zeros(1, *rows[0].shape[1:])], True
    )
    lengths = torch.tensor([len(row) for row in rows])
    return stacked[:-1].to(device), lengths.to(device)


def encode_requests(
    model: ConditionedModel,
    tokenizer: ConditionedTokenizer,
    requests: Sequence[SpeechRequest],
    device: torch.device,
    text_encoder: PretrainedTextEncoder | None = None,
) -> Conditions:
    """Encoded text, speaker and caption of the requests, as one batch; see `generate_latents`."""
    ids = [torch.tensor(tokenizer.encode(r.text, r.metadata)) for r in requests]
    text_positions = None
    if tokenizer.aligner is not None:
        expected = [torch.from_numpy(tokenizer.text_positions(r.text)) for r in requests]
        text_positions = torch.nn.utils.rnn.pad_sequence(expected, True, -1.0).to(device)
    text, text_tokens = _padded(ids, device)
    speaker, speaker_frames = _padded([r.reference.float() for r in requests], device)
    batch = {
        **{"text_ids": text, "text_tokens": text_tokens, "text_positions": text_positions},
        **{"speaker": speaker, "speaker_frames": speaker_frames},
        **{"packed": None, "text_rows": None},
    }
    if model.caption_encoder is not None:
        longest = model.args.max_caption_tokens
        captions = [
            torch.tensor(tokenizer.caption_ids(r.metadata)[:longest], dtype=torch.long)
            for r in requests
        ]
        batch["caption_ids"], batch["caption_tokens"] = _padded(captions, device)
    if text_encoder is not None:
        mask = condition_inputs(batch)["text_mask"]
        in_text = mask & (text < model.args.first_condition_id)
        batch["text_features"] = text_encoder(text, in_text)
    return model.encode_conditions(**condition_inputs(batch))


def own_frames(config: JobConfig) -> int:
    """Frames to generate of every text by a model that decides itself where the speech ends, as `speech_end` finds it; 0 for
    any other."""
    return config.data.max_frames if config.objective.loss_on_padding else 0


def speech_end(latents: torch.Tensor) -> int:
    """Return the frame at which the speech ends in latents (T, C), at least 1: the start of the first
    `_SILENT_FRAMES` behind it."""
    silent = latents.square().mean(-1).sqrt() < _SILENT_RMS
    begin = int((~silent).int().argmax())
    silent = torch.cat([silent[begin:], silent.new_ones(_SILENT_FRAMES)])
    runs = silent.unfold(0, _SILENT_FRAMES, 1).all(-1)
    return max(1, begin + int(runs.int().argmax()))


@torch.no_grad()
def generate_latents(
    model: DiTTTSModel,
    tokenizer: ConditionedTokenizer,
    objective: FlowMatching,
    requests: list[SpeechRequest],
    sampling: Sampling,
    seed: int,
    device: torch.device,
    text_encoder: PretrainedTextEncoder | None = None,
    cache_blocks: bool = True,
) -> list[torch.Tensor]:
    """Latents (frames, C) float32 on the CPU for each request, as one batch.

    The noise of a request is keyed by the seed and the request, so that its result does not depend on
    the rest of its batch. Conditions are encoded once: their K and V serve all steps and branches of
    guidance. The network runs in the dtype of the model's weights, the solver in float32.

    A request with `until` has as many frames, without the text whose place is behind them; this needs
    [model] text_positions = "aligned". Its `known` latents have the noise of each step's time, from which the others
    tell what they continue, and end as they are.

    Args:
        text_encoder: the frozen one of a model that has none inside.
        cache_blocks: computes once, for all steps, what depends on conditions and time alone. False for
            a sharded model, whose blocks are gathered only while they run.
    """
    lengths = torch.tensor([r.frames for r in requests], device=device)
    counts = [request.until or request.frames for request in requests]
    frames = max(counts)
    frame_mask = valid_mask(torch.tensor(counts, device=device), frames)
    conditions = encode_requests(model, tokenizer, requests, device, text_encoder)
    caption_mask = conditions.caption_mask
    if caption_mask is None or not caption_mask.any():
        sampling = replace(sampling, caption_scale=0.0)  # a branch would change nothing
    steps = plan_steps(sampling)
    times = sorted({t for step in steps for t in step.times}, reverse=True)
    nearest = first_way(steps)
    caches: dict[float, list[BlockCache]] = {}
    if cache_blocks:
        evaluated = torch.tensor(times, device=device)
        caches = dict(zip(times, model.block_caches(conditions, evaluated, lengths), strict=True))

    masks = (frame_mask, *conditions.masks)

    @cache
    def keys(copies: tuple[tuple[bool, ...], ...], speaker_scale: float) -> GuidedKeys:
        return guided_keys(masks, copies, conditions.text.dtype, speaker_scale)

    rows = torch.tensor([request.noise_row() for request in requests], device=device)
    noise_keys = stream_keys(seed, torch.tensor(0, device=device), rows, SAMPLING_STREAM)
    noise = sampling.truncation_factor * normal(noise_keys, (frames, model.args.latent_channels))
    nothing = torch.zeros(0, model.args.latent_channels)
    given = [nothing if request.known is None else request.known for request in requests]
    known, known_frames = _padded(given, device)
    is_known = valid_mask(known_frames, frames)[..., None]
    known = torch.nn.functional.pad(known, (0, 0, 0, frames - known.shape[1]))
    straight = (noise - known) / sampling.start_t

    def velocity(latents: torch.Tensor, t: float, step: Step) -> torch.Tensor:
        one_time = torch.full((1,), t, device=device)

        def network(rows: torch.Tensor, copies: tuple[tuple[bool, ...], ...]) -> torch.Tensor:
            chosen = keys(copies, step.speaker_kv_scale)
            output = model.denoise_guided(
                rows, one_time, chosen, conditions, lengths, caches.get(t)
            )
            return objective.velocity(output, rows, one_time, smallest_step=nearest)

        guided = guided_velocity(network, latents, step.branches)
        scale = sampling.rescale_k, sampling.rescale_sigma
        return torch.where(is_known, straight, rescaled_velocity(guided, latents, t, *scale))

    latents = integrate(velocity, noise, steps, SOLVERS[sampling.solver])
    return [row[:count].cpu() for row, count in zip(latents, counts)]


@torch.no_grad()
def predict_frames(
    model: DurationModel,
    tokenizer: ConditionedTokenizer,
    requests: Sequence[SpeechRequest],
    device: torch.device,
    text_encoder: PretrainedTextEncoder | None = None,
) -> list[float]:
    """Latent frames of each request by the duration predictor, not rounded, as one batch whose rows do not
    depend on each other.

    Args:
        requests: their own `frames` are not read.
        text_encoder: the frozen one of a model that has none inside.
    """
    conditions = encode_requests(model, tokenizer, requests, device, text_encoder)
    return model.log_frames(conditions).exp().tolist()

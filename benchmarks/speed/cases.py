"""Models and micro-batches that the gates share."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.text.vocabulary import BYTE_VOCAB_SIZE

FULL_LENGTH = Lengths(frames=768, text_tokens=192, speaker_frames=384)
"""a sample as long as the shipped configs allow"""


@dataclass
class Outcome:
    """What a gate found."""

    passed: bool
    aim: str
    measured: str
    details: dict[str, Any]


def fifty_million() -> DiTTTSModelArgs:
    """Sizes of a model of about 50 million parameters, with a learned text encoder."""
    return DiTTTSModelArgs(
        dim=512,
        n_layers=9,
        n_heads=8,
        mlp_dim=1408,
        speaker_dim=256,
        speaker_n_layers=3,
        speaker_n_heads=4,
        speaker_mlp_dim=704,
        text_dim=256,
        text_vocab_size=BYTE_VOCAB_SIZE,
        text_n_layers=2,
        text_n_heads=4,
        adaln_rank=96,
        timestep_dim=256,
    )


def debug_model() -> DiTTTSModelArgs:
    """The debug flavor as its config has it, with the bytes' encoder."""
    return replace(
        model_flavors()["debug"], text_vocab_size=BYTE_VOCAB_SIZE, text_n_layers=2, text_n_heads=2
    )


def random_batch(
    args: DiTTTSModelArgs, samples: int, lengths: Lengths, *, padded: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Arguments of the model's forward pass: random values; with `padded`, each sample after the first
    is shorter, and the second goes without its text and the third without its speaker."""
    generator = torch.Generator().manual_seed(seed)
    T, L, S = lengths.frames, lengths.text_tokens, lengths.speaker_frames

    def mask(length: int) -> torch.Tensor:
        shortest = length - length // 4 if padded else length
        ends = torch.linspace(length, shortest, samples).round()[:, None]
        return torch.arange(length) < ends

    keep = torch.ones(samples, dtype=torch.bool)
    keep_text, keep_speaker = keep.clone(), keep.clone()
    if padded:
        keep_text[1:2] = False
        keep_speaker[2:3] = False
    batch = {
        "latents": 0.8 * torch.randn(samples, T, args.latent_channels, generator=generator),
        "t": torch.rand(samples, generator=generator),
        "frame_mask": mask(T),
        "text_ids": torch.randint(3, BYTE_VOCAB_SIZE, (samples, L), generator=generator),
        "text_mask": mask(L),
        "speaker": 0.8 * torch.randn(samples, S, args.latent_channels, generator=generator),
        "speaker_mask": mask(S),
        "keep_text": keep_text,
        "keep_speaker": keep_speaker,
    }
    if not args.text_vocab_size:
        batch["text_features"] = torch.randn(samples, L, args.text_dim, generator=generator)
    return batch


def randomize(parameters: Iterable[torch.nn.Parameter], seed: int = 0) -> None:
    """Normal values everywhere, matrices with variance 1 / fan-in, so that no part is switched off by a
    zero initial value or too small to be seen in the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            mean, std = (1.0, 0.1) if parameter.dim() == 1 else (0.0, parameter.shape[-1] ** -0.5)
            parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

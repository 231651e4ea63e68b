"""Changes of the network's velocity in sampling: classifier-free guidance and score rescaling."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchtitan.models.dit_tts.config.job_config import Sampling

Network = Callable[[torch.Tensor, tuple[tuple[bool, ...], ...]], torch.Tensor]
"""(latents (N·B, T, C), whether each of the N copies has text, speaker and caption) to velocity (N·B, T, C)."""


class Branch(NamedTuple):
    """A velocity without a condition, from which guidance leads away."""

    scale: float | torch.Tensor
    """(B, T, 1) or less where it differs by row"""

    has_text: bool
    has_speaker: bool
    has_caption: bool = True


def is_guided(sampling: Sampling, t: Any) -> Any:
    """True if steps that begin at t, a number or a tensor, are guided: those in (min_t, max_t] (Kynkäänniemi et al. 2024,
    Applying Guidance in a Limited Interval, arXiv 2404.07724)."""
    # Times of a schedule are rounded.
    return (sampling.min_t + 1e-6 < t) & (t <= sampling.max_t + 1e-6)


def branches_of(sampling: Sampling, step: int = 0) -> tuple[Branch, ...]:
    """The branches of a guided step; none with scale 0.

    independent: one without the text, one without the speaker, one without the caption.
    joint: one without all of them; their scales are equal.
    alternating: without the text, the speaker and, where it is guided, the caption in turn. As in Irodori-TTS the
        scales stay, so each condition is guided less.
    """
    every = (
        Branch(sampling.text_scale, has_text=False, has_speaker=True),
        Branch(sampling.speaker_scale, has_text=True, has_speaker=False),
        Branch(sampling.caption_scale, has_text=True, has_speaker=True, has_caption=False),
    )
    turns = every if sampling.caption_scale else every[:2]
    chosen = {
        "independent": every,
        "joint": (Branch(sampling.text_scale, False, False, False),),
        "alternating": (turns[step % len(turns)],),
    }[sampling.guidance]
    return tuple(branch for branch in chosen if branch.scale != 0.0)


def branches_at(sampling: Sampling, step: int, t: float) -> tuple[Branch, ...]:
    """The branches of a step that begins at time t."""
    return branches_of(sampling, step) if is_guided(sampling, t) else ()


def guided_velocity(
    network: Network, latents: torch.Tensor, branches: Sequence[Branch]
) -> torch.Tensor:
    """v + Σ scale·(v - v_branch) (B, T, C): classifier-free guidance (Ho and Salimans 2022) with conditions scaled one by
    one. `network` sees (1 + branches)·B rows."""
    copies = ((True, True, True), *(branch[1:] for branch in branches))
    outputs = network(latents.repeat(len(copies), 1, 1), copies)
    conditional, *unconditional = outputs.chunk(len(copies))
    velocity = conditional
    for branch, other in zip(branches, unconditional):
        velocity = velocity + branch.scale * (conditional - other)
    return velocity


def rescaled_velocity(
    velocity: torch.Tensor, latents: torch.Tensor, t: float, k: float, sigma: float
) -> torch.Tensor:
    """Temporal score rescaling (Xu et al. 2025, arXiv 2510.01184): the velocity (B, T, C) whose score is r
    times as large.

    r = (η·σ² + 1) / (η·σ²/k + 1) with the signal-to-noise ratio η = (1 - t)² / t²: the ratio of the scores
    of Gaussian data of variances σ²/k and σ². The score is -ε/t and ε = x + (1 - t)·v, so v gains
    (r - 1)·ε / (1 - t), which is written here without the poles at t = 0 and t = 1.
    """
    if k == 1.0:
        return velocity
    data = 1.0 - t
    gain = data * sigma**2 * (1.0 - 1.0 / k) / ((data * sigma) ** 2 / k + t**2)
    return velocity + gain * (latents + data * velocity)

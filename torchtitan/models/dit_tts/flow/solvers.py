"""Sampling: integrates the learned velocity from noise (t = 1) to data (t = 0)."""

from collections.abc import Callable

import torch

Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""(latents (B, T, C), t) to velocity (B, T, C)."""


def linear_times(steps: int) -> list[float]:
    """steps + 1 times from 1 to 0, evenly spaced."""
    return torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64).tolist()


def euler(velocity: Velocity, noise: torch.Tensor, times: list[float]) -> torch.Tensor:
    """First-order solver: x ← x + (t_next - t)·v(x, t) over the given times."""
    x = noise
    for t, t_next in zip(times[:-1], times[1:]):
        x = x + (t_next - t) * velocity(x, t)
    return x

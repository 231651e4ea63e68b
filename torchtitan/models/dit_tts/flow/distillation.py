"""Few-step sampling learned from a teacher: trajectory distillation (Salimans and Ho 2022, arXiv 2202.00512) with the
guidance folded in (Meng et al. 2023, arXiv 2210.03142).

At the start of each of its few intervals the student learns the mean of the teacher's guided velocity over the
interval: one step of Euler's method goes where the teacher's many steps go. Every interval begins from data and noise,
and is learned by itself (as in multistep consistency models, Heek et al. 2024, arXiv 2403.06807).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.flow.guidance import branches_of, guided_velocity, is_guided
from torchtitan.models.dit_tts.streams import Stream, per_position


@dataclass(frozen=True)
class Distillation:
    """Targets of a student."""

    times: tuple[float, ...]
    """start times of the student's intervals, from 1 on; the last interval ends at 0"""

    steps: int
    """of the teacher in an interval, all of the same width, by Euler's method"""

    guidance: Sampling
    """the teacher's"""

    def mean_velocity(
        self,
        denoise: Callable[..., torch.Tensor],
        latents: torch.Tensor,
        t: torch.Tensor,
        packed: Stream | None = None,
    ) -> torch.Tensor:
        """The teacher's mean velocity (B, T, C) from latents (B, T, C) at times t (B,) to the ends of their intervals.

        Args:
            denoise: (latents, t, whether text, speaker and caption are seen) to the teacher's velocity.
            packed: where the B samples are that stand in one row, (1, T, C).
        """

        def per_frame(values: torch.Tensor) -> torch.Tensor:
            column = values[:, None, None]
            return column if packed is None else per_position(column, packed)

        # Filled on the device, for which the host would wait otherwise. Times of a schedule are rounded.
        bounds = torch.stack([t.new_full((), each) for each in (*self.times, 0.0)])
        width = t - bounds[(t[:, None] <= bounds + 1e-6).sum(1)]
        branches = branches_of(self.guidance)
        x, total = latents, torch.zeros_like(latents)
        for number in range(self.steps):
            now = t - width * (number / self.steps)

            def network(
                rows: torch.Tensor, copies: tuple[tuple[bool, ...], ...], t: torch.Tensor = now
            ) -> torch.Tensor:
                # One after another: in training's shapes, which are compiled, and packed rows stay single.
                parts = zip(rows.chunk(len(copies)), copies, strict=True)
                return torch.cat([denoise(part, t, *has) for part, has in parts])

            guided = per_frame(is_guided(self.guidance, now).float())
            scaled = [branch._replace(scale=branch.scale * guided) for branch in branches]
            velocity = guided_velocity(network, x, scaled)
            x = x - per_frame(width / self.steps) * velocity
            total = total + velocity
        return total / self.steps

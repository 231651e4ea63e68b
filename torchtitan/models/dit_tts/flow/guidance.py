"""Classifier-free guidance (Ho and Salimans 2022) with text and speaker scaled independently."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Branches = Callable[[torch.Tensor, float, tuple[tuple[bool, bool], ...]], torch.Tensor]
"""(latents (N·B, T, C), t, whether each of the N copies has text and speaker) to velocity (N·B, T, C)."""


@dataclass(frozen=True)
class Guidance:
    """v + s_txt·(v - v_no_text) + s_spk·(v - v_no_speaker) for times in (min_t, 1], else v.

    So a step that begins at min_t, and lies below, is not guided. A branch with scale 0 is not computed;
    the others run as one batch.
    """

    text_scale: float = 3.0
    speaker_scale: float = 0.0
    min_t: float = 0.5

    def branches_at(self, t: float) -> list[tuple[float, bool, bool]]:
        """(scale, keep text, keep speaker) of each unconditional branch at time t."""
        if t <= self.min_t + 1e-6:  # times of a schedule are rounded
            return []
        branches = [(self.text_scale, False, True), (self.speaker_scale, True, False)]
        return [branch for branch in branches if branch[0] != 0.0]

    def velocity(self, network: Branches, latents: torch.Tensor, t: float) -> torch.Tensor:
        """Guided velocity (B, T, C); `network` sees (1 + branches)·B rows."""
        branches = self.branches_at(t)
        copies = ((True, True), *(branch[1:] for branch in branches))
        outputs = network(latents.repeat(len(copies), 1, 1), t, copies)
        conditional, *unconditional = outputs.chunk(len(copies))
        velocity = conditional
        for (scale, _, _), other in zip(branches, unconditional):
            velocity = velocity + scale * (conditional - other)
        return velocity

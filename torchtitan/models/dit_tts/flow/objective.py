"""The linear-path flow-matching objective (Lipman et al. 2023; Liu et al. 2023).

x_t = (1 - t)·x_0 + t·ε, where t = 0 is data and t = 1 is noise. The velocity target is
v = ε - x_0, hence x_0 = x_t - t·v and ε = x_t + (1 - t)·v.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.models.dit_tts.config.job_config import DURATION_FLAVOR, JobConfig, Objective
from torchtitan.models.dit_tts.flow.counter_rng import normal, permuted, stream_keys, uniform
from torchtitan.models.dit_tts.flow.duration import relative_error_sums
from torchtitan.models.dit_tts.streams import Stream

_NOISE, _TIME, _TEXT_DROPOUT, _SPEAKER_DROPOUT, _STRATA, _CAPTION_DROPOUT = range(6)


@dataclass(frozen=True)
class NoisyBatch:
    """Noisy latents and the target of the network for a batch of clean latents."""

    latents: torch.Tensor
    """(B, T, C) noisy latents x_t"""

    t: torch.Tensor
    """(B,) float32 time"""

    target: torch.Tensor
    """(B, T, C) velocity or noise"""

    keep_text: torch.Tensor
    """(B,) bool, false where the text is dropped"""

    keep_speaker: torch.Tensor
    """(B,) bool, false where the speaker is dropped"""

    keep_caption: torch.Tensor
    """(B,) bool, false where the caption is dropped"""

    @property
    def keep(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keep masks of text, speaker and caption."""
        return self.keep_text, self.keep_speaker, self.keep_caption


@dataclass
class FlowMatching(Objective):
    """Draws times, noise and condition dropout as [objective] says, keyed by (seed, position in the stream)."""

    seed: int = 0
    times: tuple[float, ...] = ()
    """to draw from evenly, instead of the distribution"""

    def sample_times(
        self,
        global_batch: torch.Tensor,
        row: torch.Tensor,
        global_batch_size: int | torch.Tensor,
    ) -> torch.Tensor:
        """Times (B,) float32. Each row of a global batch of n draws its time from one of n equal strata of the
        distribution. Each global batch permutes the strata, or every rank would see a band of times of its own."""
        keys = stream_keys(self.seed, global_batch, row, _TIME)
        batch_keys = stream_keys(self.seed, global_batch, torch.zeros_like(row), _STRATA)
        stratum = permuted(row, batch_keys, global_batch_size)
        u = (stratum + uniform(keys)) / global_batch_size
        if self.times:
            # Filled on the device, for which the host would wait otherwise.
            times = torch.stack([u.new_full((), each) for each in self.times])
            return times[(u * len(self.times)).long()].float()
        if self.time_distribution == "logit_normal":
            u = torch.sigmoid(self.logit_mean + self.logit_std * torch.special.ndtri(u))
        return u.float()

    def add_noise(
        self,
        latents: torch.Tensor,
        global_batch: torch.Tensor,
        row: torch.Tensor,
        global_batch_size: int | torch.Tensor,
        packed: Stream | None = None,
    ) -> NoisyBatch:
        """Draws time, noise and condition dropout of a micro-batch.

        Args:
            latents: (B, T, C) float32 clean latents, zero at padding.
            global_batch: number of the global batch; row: (B,) int64, rows in it; global_batch_size: how many it has.
            packed: where the B samples are, whose latents (1, T, C) stand in one row; C is even.
        """

        def keys(stream: int) -> torch.Tensor:
            return stream_keys(self.seed, global_batch, row, stream)

        t = self.sample_times(global_batch, row, global_batch_size)
        noisy, target = self.add_noise_at(latents, t, keys(_NOISE), packed)
        return NoisyBatch(
            latents=noisy,
            t=t,
            target=target,
            keep_text=uniform(keys(_TEXT_DROPOUT)) >= self.text_dropout,
            keep_speaker=uniform(keys(_SPEAKER_DROPOUT)) >= self.speaker_dropout,
            keep_caption=uniform(keys(_CAPTION_DROPOUT)) >= self.caption_dropout,
        )

    def add_noise_at(
        self,
        latents: torch.Tensor,
        t: torch.Tensor,
        keys: torch.Tensor,
        packed: Stream | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Noisy latents and the network's target (B, T, C) at times t (B,), with noise from keys (B,)."""
        if packed is None:
            noise = normal(keys, tuple(latents.shape[1:]))
            t = t[:, None, None]
        else:  # a frame has the same noise as in a row of its own
            channels = latents.shape[-1]
            first = packed.position * (channels // 2)
            noise = normal(keys[packed.segment], (channels,), first)[None]
            t = t[packed.segment, None]
        noisy = (1.0 - t) * latents + t * noise
        return noisy, noise - latents if self.prediction == "velocity" else noise

    def velocity(
        self,
        output: torch.Tensor,
        latents: torch.Tensor,
        t: torch.Tensor,
        smallest_step: float = 1e-3,
    ) -> torch.Tensor:
        """Velocity from the network's output at (latents, t); v = (ε - x_t) / (1 - t) for noise.

        At t = 1 a noise prediction does not determine the velocity, and near it hardly. So 1 - t is at least the solver's
        first step, in which a prediction error moves the sample by at most that error.
        """
        if self.prediction == "velocity":
            return output
        return (output - latents) / (1.0 - t[:, None, None]).clamp_min(smallest_step)


def squared_error_sums(
    prediction: torch.Tensor,
    target: torch.Tensor,
    frame_mask: torch.Tensor,
    packed: Stream | None = None,
) -> torch.Tensor:
    """(B,) float32: per row, the sum over valid frames of the mean squared error over channels.

    prediction and target (B, T, C), frame_mask (B, T). Their sum divided by the number of valid frames
    of the global batch is the loss, however the batch is split. (S,) of the samples that are packed in one row.
    """
    error = (prediction.float() - target.float()).square().mean(-1)
    error = torch.where(frame_mask, error, 0.0)
    if packed is not None:
        error = error * (
            torch.arange(packed.samples, device=error.device)[:, None] == packed.segment
        )
    return error.sum(-1)


def build_objective(job_config: JobConfig) -> FlowMatching:
    """The objective of a run."""
    own, times = vars(job_config.objective), tuple(job_config.distill.times)
    return FlowMatching(**own, seed=job_config.data.seed, times=times)


def build_flow_loss(job_config: JobConfig, **kwargs: Any) -> Callable[..., torch.Tensor]:
    """Upstream's hook for the loss function: (output, target, frame_mask) to a sum per row."""
    if job_config.model.flavor == DURATION_FLAVOR:
        return relative_error_sums
    return squared_error_sums

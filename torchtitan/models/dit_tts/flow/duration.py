"""The loss of the duration predictor and the figures that its validation reports."""

from collections.abc import Callable

import torch


def relative_error_sums(
    log_frames: torch.Tensor, target: torch.Tensor, frame_mask: torch.Tensor
) -> torch.Tensor:
    """(B,) float32: per row |log(predicted / real frames)| times the real frames. Their sum divided by the valid frames of
    the global batch is the mean error of a second of speech as a fraction, however the batch is split.

    log_frames (B,) of the predicted frames; frame_mask (B, T), true at the real ones. `target` is the denoiser's.
    """
    frames = frame_mask.sum(1)
    return frames * (log_frames.float() - frames.clamp(min=1).log()).abs()


def duration_figures(
    frames_per_second: float,
) -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Functions (log_frames (B,), frame_mask (B, T)) to (B,), whose mean is reported: the error in seconds,
    and whether the length is within 10 % of the real one."""

    def seconds_error(log_frames: torch.Tensor, frame_mask: torch.Tensor) -> torch.Tensor:
        return (log_frames.exp() - frame_mask.sum(1)).abs() / frames_per_second

    def within(log_frames: torch.Tensor, frame_mask: torch.Tensor) -> torch.Tensor:
        frames = frame_mask.sum(1)
        return ((log_frames.exp() - frames).abs() <= 0.1 * frames).double()

    return {"seconds_error": seconds_error, "within_10_percent": within}

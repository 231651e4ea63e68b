"""Cuts off what is padding in every row of a micro-batch, for runs whose shapes need not be static."""

from typing import Any

import torch

from torchtitan.models.dit_tts.data.buckets import ALIGNMENT


def trim_padding(batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """Replaces the tensors of a batch of `LatentDataLoader` by views that end with the longest row's
    length, rounded up to `ALIGNMENT`, of each stream. Returns the labels' view."""
    longest = (
        batch["frames"].max(),
        batch["text_mask"].sum(1).max(),
        batch["speaker_mask"].sum(1).max(),
    )
    # At least one position: an empty stream is masked, not missing.
    T, L, R = (max(1, -(-int(length) // ALIGNMENT)) * ALIGNMENT for length in longest)
    for end, names in (
        (T, ("latents",)),
        (L, ("text_ids", "text_mask", "text_features", "text_places")),
        (R, ("speaker", "speaker_mask")),
    ):
        for name in names:
            if name in batch:
                batch[name] = batch[name][:, :end]
    return labels[:, :T]

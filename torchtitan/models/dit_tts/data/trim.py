"""Cuts off the padding that all rows of a micro-batch share, for runs whose shapes need not be static."""

from typing import Any

import torch

from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.buckets import ALIGNMENT


def trim_padding(batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """Replaces the tensors of a batch of `LatentDataLoader` by views that end with the longest row's
    length, rounded up to `ALIGNMENT`, of each stream. Returns the labels' view."""
    longest = (int(batch[name].max()) for name in ("frames", "text_tokens", "speaker_frames"))
    # At least one position: an empty stream is masked, not missing.
    T, L, R = (max(1, -(-length // ALIGNMENT)) * ALIGNMENT for length in longest)
    padded = {"frames": T, "reference_frames": R}
    ends = {member.entry: padded[member.length] for member in members.ARRAYS}
    ends |= dict.fromkeys(("text_ids", "text_positions"), L)
    for name, end in ends.items():
        if name in batch:
            batch[name] = batch[name][:, :end]
    return labels[:, :T]

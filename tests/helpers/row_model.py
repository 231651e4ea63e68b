"""A model for sampling whose velocity has, in each channel, what reached a row of the batch."""

from collections.abc import Sequence
from itertools import compress
from types import SimpleNamespace

import torch

from torchtitan.models.dit_tts.model.conditions import Conditions
from torchtitan.models.dit_tts.model.model import BlockCache

CHANNELS = 8
FIRST_CONDITION_ID = 259
"""ids of a byte tokenizer's text are below"""

TEXT_KEYS, TEXT_VALUES, SPEAKER_KEYS, SPEAKER_VALUES, ENCODED, TIME, FRAMES = range(7)
"""what a channel of the velocity is: sums over the first block's K and the last one's V of the row's text
and speaker, over its encoded conditions, the time, the number of valid frames; the last is zero"""

LAYERS = 2


class RowModel:
    """`DiTTTSModel` as far as `generate_latents` uses it; sums are over what the masks keep."""

    caption_encoder = None
    args = SimpleNamespace(
        latent_channels=CHANNELS, first_condition_id=FIRST_CONDITION_ID, speaker_reference=True
    )

    def encode_conditions(
        self, text_ids, text_mask, speaker, speaker_mask, *, text_positions, **more
    ):
        content = more["text_features"]
        content = text_ids[..., None].float() if content is None else content
        # Plus one: padding would be zeros, and zeros count for nothing whatever the mask is.
        return Conditions(
            content + 1, text_mask, speaker[..., :1] + 1, speaker_mask, text_positions
        )

    def block_caches(self, conditions, times, frames):
        """K and V are those of `_key_values`; the modulation is the time plus the number of the block."""
        return [
            [
                BlockCache(pairs, t + layer)
                for layer, pairs in enumerate(self._key_values(conditions))
            ]
            for t in times
        ]

    def _key_values(self, conditions):
        return [
            tuple(
                (layer * content[..., None], 10 * layer * content[..., None])
                for content in (conditions.text, conditions.speaker)
            )
            for layer in range(1, LAYERS + 1)
        ]

    def denoise_guided(self, latents, t, keys, conditions, lengths, caches):
        key_values = self._key_values(conditions)
        if caches is not None:
            key_values = [cache.key_values for cache in caches]
            assert all(c.modulation == t + layer for layer, c in enumerate(caches))
        rows, frames = len(conditions.text), latents.shape[1]
        velocity = torch.zeros_like(latents)
        for copy, (has, mask) in enumerate(zip(keys.copies, keys.masks, strict=True)):
            own = velocity[copy * rows : (copy + 1) * rows]
            streams = list(compress((conditions.text, conditions.speaker), has))
            width = frames + sum(stream.shape[1] for stream in streams)
            valid = (
                torch.ones(rows, width, dtype=torch.bool) if mask is None else mask[:, 0, 0] == 0
            )
            own[..., FRAMES] = valid[:, :frames].sum(1)[:, None].float()
            own[..., TIME] = t
            start = frames
            for stream, place in compress(enumerate((TEXT_KEYS, SPEAKER_KEYS)), has):
                content = (conditions.text, conditions.speaker)[stream]
                kept = valid[:, start : start + content.shape[1]]
                start += content.shape[1]
                first, last = key_values[0][stream], key_values[-1][stream]
                own[..., place] = (first[0].flatten(1) * kept).sum(1)[:, None]
                own[..., place + 1] = (last[1].flatten(1) * kept).sum(1)[:, None]
                own[..., ENCODED] += (content.flatten(1) * kept).sum(1)[:, None]
        return velocity


def moved(
    text: Sequence[float],
    reference: torch.Tensor,
    frames: int,
    text_gain: float = 1.0,
    speaker_gain: float = 1.0,
    mean_time: float = 0.5,
) -> torch.Tensor:
    """(CHANNELS,) how far sampling takes the noise of a row, by hand.

    Args:
        text: ids, or features (L,), of the row alone.
        reference: (R, C) of its speaker.
        text_gain, speaker_gain: mean over the steps of what guidance multiplies a condition by.
        mean_time: over the steps.
    """
    of_text = text_gain * sum(value + 1 for value in text)
    of_speaker = speaker_gain * sum(float(value) + 1 for value in reference[:, 0])
    out = [0.0] * CHANNELS
    out[TEXT_KEYS], out[TEXT_VALUES] = of_text, 10 * LAYERS * of_text
    out[SPEAKER_KEYS], out[SPEAKER_VALUES] = of_speaker, 10 * LAYERS * of_speaker
    out[ENCODED] = of_text + of_speaker
    out[TIME], out[FRAMES] = mean_time, float(frames)
    return torch.tensor(out)

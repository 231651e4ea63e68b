"""A model for sampling whose velocity has, in each channel, what reached a row of the batch."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from torchtitan.models.dit_tts.model.model import Conditions

CHANNELS = 8
CONDITION_BASE = 259
"""ids of a byte tokenizer's text are below"""

TEXT_KEYS, TEXT_VALUES, SPEAKER_KEYS, SPEAKER_VALUES, ENCODED, TIME, FRAMES = range(7)
"""what a channel of the velocity is: sums over the K and V of the row's text and speaker, over its
encoded conditions, the time, the number of valid frames; the last is zero"""

LAYERS = 2


class RowModel:
    """`DiTTTSModel` as far as `generate_latents` uses it; sums are over what the masks keep."""

    args = SimpleNamespace(latent_channels=CHANNELS, condition_base=CONDITION_BASE)

    def encode_conditions(self, text, text_mask, speaker, speaker_mask, features=None):
        content = text[..., None].float() if features is None else features
        # Plus one: padding would be zeros, and zeros count for nothing whatever the mask is.
        return Conditions(content + 1, text_mask, speaker[..., :1] + 1, speaker_mask)

    def condition_key_values(self, conditions):
        return [
            tuple(
                (layer * content[..., None], 10 * layer * content[..., None])
                for content in (conditions.text, conditions.speaker)
            )
            for layer in range(1, LAYERS + 1)
        ]

    def denoise(self, latents, t, frame_mask, conditions, keep_text, keep_speaker, key_values):
        text_mask = conditions.text_mask & keep_text[:, None]
        speaker_mask = conditions.speaker_mask & keep_speaker[:, None]
        key_values = key_values or self.condition_key_values(conditions)

        def total(content: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (content.flatten(1) * mask).sum(1)

        (first_text, _), (_, last_speaker) = key_values[0][0], key_values[-1][1]
        (_, last_text), (first_speaker, _) = key_values[-1][0], key_values[0][1]
        velocity = torch.zeros_like(latents)
        velocity[..., TEXT_KEYS] = total(first_text, text_mask)[:, None]
        velocity[..., TEXT_VALUES] = total(last_text, text_mask)[:, None]
        velocity[..., SPEAKER_KEYS] = total(first_speaker, speaker_mask)[:, None]
        velocity[..., SPEAKER_VALUES] = total(last_speaker, speaker_mask)[:, None]
        encoded = total(conditions.text, text_mask) + total(conditions.speaker, speaker_mask)
        velocity[..., ENCODED] = encoded[:, None]
        velocity[..., TIME] = t[:, None]
        velocity[..., FRAMES] = frame_mask.sum(1)[:, None].float()
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

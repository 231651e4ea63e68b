"""Guidance of every mode and score rescaling against what they are by definition."""

import pytest
import torch

from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.flow.guidance import branches_at, guided_velocity, rescaled_velocity


@pytest.mark.parametrize(
    "text_scale, speaker_scale, t, step, mode, expected, rows",
    [
        (3.0, 5.0, 0.9, 0, {}, 3 * 10 + 5 * 100, 6),
        (0.0, 5.0, 0.51, 0, {}, 5 * 100, 4),
        (3.0, 5.0, 0.5, 0, {}, 0, 2),
        (3.0, 5.0, 0.9, 0, {"max_t": 0.9}, 3 * 10 + 5 * 100, 6),
        (3.0, 5.0, 0.9, 0, {"max_t": 0.8}, 0, 2),
        (3.0, 5.0, 0.9, 0, {"caption_scale": 7.0}, 3 * 10 + 5 * 100 + 7 * 1000, 8),
        (4.0, 4.0, 0.9, 0, {"guidance": "joint"}, 4 * 1110, 4),
        (3.0, 5.0, 0.9, 0, {"guidance": "alternating"}, 3 * 10, 4),
        (3.0, 5.0, 0.9, 1, {"guidance": "alternating"}, 5 * 100, 4),
        (3.0, 5.0, 0.9, 2, {"guidance": "alternating"}, 3 * 10, 4),
        (3.0, 5.0, 0.9, 2, {"guidance": "alternating", "caption_scale": 7.0}, 7 * 1000, 4),
        (3.0, 5.0, 0.4, 1, {"guidance": "alternating"}, 0, 2),
    ],
)
def test_guidance(text_scale, speaker_scale, t, step, mode, expected, rows):
    seen = []

    def network(latents, copies):
        """Its answer has its branch, 1 + 10·text + 100·speaker + 1000·caption, and its row."""
        seen.append(len(latents))
        values = 1.0 + torch.tensor(copies).float() @ torch.tensor([10.0, 100.0, 1000.0])
        return latents + values.repeat_interleave(len(latents) // len(copies))[:, None, None]

    settings = Sampling(text_scale=text_scale, speaker_scale=speaker_scale, **mode)
    latents = torch.arange(24.0).view(2, 3, 4)
    velocity = guided_velocity(network, latents, branches_at(settings, step, t))
    assert torch.equal(velocity, latents + 1111 + expected)
    assert seen == [rows]


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gaussian_velocity(x, t, deviation):
    return x * (t - (1 - t) * deviation**2) / ((1 - t) ** 2 * deviation**2 + t**2)


@pytest.mark.parametrize("k", [0.5, 1.0, 4.0])
def test_rescaling_of_the_score_is_sampling_of_a_smaller_variance(k):
    """The velocity of Gaussian data becomes that of data of a variance k times as small, at every t."""
    x = some(2, 3, 4).double()
    for t in (1.0, 0.999, 0.5, 0.01, 0.0):
        found = rescaled_velocity(gaussian_velocity(x, t, 0.8), x, t, k, sigma=0.8)
        torch.testing.assert_close(found, gaussian_velocity(x, t, 0.8 / k**0.5))

    # For any velocity: r·score, with the score -(x + (1 - t)·v)/t and the r of the paper.
    v, t, sigma = some(2, 3, 4, seed=1).double(), 0.3, 2.0
    snr = (1 - t) ** 2 / t**2
    ratio = (snr * sigma**2 + 1) / (snr * sigma**2 / k + 1)
    found = rescaled_velocity(v, x, t, k, sigma)
    torch.testing.assert_close(x + (1 - t) * found, ratio * (x + (1 - t) * v))

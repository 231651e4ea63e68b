"""Whether a reference holds a part of its target."""

import numpy as np
import pytest

from torchtitan.models.dit_tts.data.leak import LEAK_FRAMES, is_leak


def speech(frames: int, seed: int = 0, channels: int = 8) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((frames, channels))
    return values.astype(np.float16).astype(np.float32)


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


@pytest.mark.parametrize("channels", [1, 128])
def test_a_part_of_the_target_is_found_wherever_it_stands(channels):
    latents, other = speech(60, channels=channels), speech(40, 1, channels)
    for start in (0, 17, 60 - LEAK_FRAMES):
        part = latents[start : start + LEAK_FRAMES]
        assert is_leak(part, latents)
        for reference in (joined(part, other), joined(other, part), joined(other, part, other)):
            assert is_leak(reference, latents)
            assert is_leak(latents, joined(other, reference))
            changed = reference.copy()
            places = np.flatnonzero((reference[:, None] == part).all(-1).any(1))
            changed[places[5]] += 1
            assert not is_leak(changed, latents)
    assert is_leak(latents, latents) and is_leak(np.negative(-latents), latents)


def test_a_short_reference_is_a_part_as_a_complete_one():
    latents = speech(30)
    for frames in (1, 2, LEAK_FRAMES - 1):
        assert is_leak(latents[7 : 7 + frames], latents)
        assert is_leak(latents[:frames], latents[:frames])
        assert not is_leak(joined(latents[7 : 7 + frames - 1], speech(1, 1)), latents)
    assert not is_leak(latents[:5], latents[:4])


def test_what_two_recordings_share_is_no_leak():
    """Nothing, frames of digital silence with an edge, single frames, frames in another order."""
    silence = np.tile(speech(1, 9), (40, 1))
    edge = speech(6, 8)
    assert not is_leak(speech(0), speech(30)) and not is_leak(speech(30, 1), speech(30))
    latents = joined(edge, silence, speech(50))
    assert not is_leak(joined(edge, silence, speech(50, 1)), latents)
    assert not is_leak(silence, latents) and not is_leak(silence[:5], latents)
    assert not is_leak(latents[::-1], latents)
    assert not is_leak(latents[::2], latents)
    # A zero has two signs, which encoders mix.
    zeros = joined(speech(12), np.zeros((1, 8), np.float32))
    zeros[:, 3] = 0
    minus = zeros.copy()
    minus[:, 3] = -0.0
    assert is_leak(zeros, minus)

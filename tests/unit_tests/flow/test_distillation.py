"""A student's target against integration, row by row, of a field that is known in closed form."""

import numpy as np
import pytest
import torch

from tests.helpers.packed_batches import in_one_row
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.flow.distillation import Distillation
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.streams import stream_of

TIMES = [1.0, 0.7, 0.55, 0.2]
T = [0.7, 1.0, 0.2, 0.55, 0.7]
LENGTHS = [3, 1, 4, 2, 2]


def field(x, t, has_text, has_speaker):
    """Nonlinear in time, so that the number of steps shows; each condition has its own slope."""
    return (0.5 + 0.4 * has_text - 0.7 * has_speaker) * x + 2.0 * t**2 + 0.3 * has_text


def guided(x, t, text, speaker, guidance, inside):
    v = field(x, t, 1, 1)
    if not inside[0] + 1e-6 < t <= inside[1] + 1e-6:
        return v
    if guidance == "joint":
        return v + text * (v - field(x, t, 0, 0))
    return v + text * (v - field(x, t, 0, 1)) + speaker * (v - field(x, t, 1, 0))


def followed(x, begin, end, steps, *how):
    """(x at the end - x at the start) / (end - begin), by Euler's method in float64."""
    start, width = x.copy(), (end - begin) / steps
    for number in range(steps):
        x = x + width * guided(x, begin + number * width, *how)
    return (x - start) / (end - begin)


@pytest.mark.parametrize(
    "guidance, text, speaker, steps, passes",
    [("independent", 2.0, 0.5, 3, 9), ("joint", 1.5, 1.5, 4, 8), ("independent", 0.0, 3.0, 2, 4)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_target_is_the_teachers_mean_velocity(guidance, text, speaker, steps, passes, packed):
    scales = {"text_scale": text, "speaker_scale": speaker, "guidance": guidance}
    # In the interval from 0.7 only some steps are guided.
    found = Distillation(tuple(TIMES), steps, Sampling(min_t=0.6, max_t=0.95, **scales))
    padded = torch.randn(len(T), 4, 6, generator=torch.Generator().manual_seed(0))
    latents, stream, calls = padded, None, []
    if packed:
        latents = in_one_row(padded, LENGTHS, 16)
        stream = stream_of(torch.tensor(LENGTHS), 16, 4)

    def denoise(x, t, has_text, has_speaker, has_caption):
        calls.append(t)
        column = t[:, None, None] if stream is None else t[stream.segment][None, :, None]
        return field(x, column, has_text, has_speaker)

    target = found.mean_velocity(denoise, latents, torch.tensor(T), stream)
    assert len(calls) == passes and target.shape == latents.shape
    starts = np.cumsum([0, *LENGTHS])
    for row, (t, frames) in enumerate(zip(T, LENGTHS, strict=True)):
        end = [*TIMES, 0.0][TIMES.index(t) + 1]
        x = padded[row, :frames].double().numpy()
        wanted = followed(x, t, end, steps, text, speaker, guidance, (0.6, 0.95))
        own = target[0, starts[row] : starts[row] + frames] if packed else target[row, :frames]
        np.testing.assert_allclose(own.numpy(), wanted, rtol=2e-5, atol=2e-5)


def test_each_time_of_the_student_has_its_share_of_every_global_batch():
    objective = FlowMatching(seed=3, times=tuple(TIMES))
    batch = torch.tensor(5)
    t = objective.sample_times(batch, torch.arange(12), 12)
    values, counts = t.unique(return_counts=True)
    assert values.tolist() == torch.tensor(sorted(TIMES)).tolist() and counts.tolist() == [3] * 4
    other = objective.sample_times(batch + 1, torch.arange(12), 12)
    assert not torch.equal(t, other)
    # A row's time depends on no other row of its micro-batch.
    assert torch.equal(objective.sample_times(batch, torch.arange(4, 8), 12), t[4:8])

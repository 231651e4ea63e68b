"""The objective and its randomness keyed by position."""

import itertools
import math

import pytest
import torch

from tests.helpers.small_models import until
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.flow import counter_rng
from torchtitan.models.dit_tts.flow.counter_rng import (
    normal,
    permuted,
    stream_keys,
    uniform,
)
from torchtitan.models.dit_tts.flow.objective import (
    FlowMatching,
    build_objective,
    squared_error_sums,
)


def keys_of(seed: int, batch: int, rows: int | list[int], stream: int = 0) -> torch.Tensor:
    rows = list(range(rows)) if isinstance(rows, int) else rows
    return stream_keys(seed, torch.tensor(batch), torch.tensor(rows), stream)


GAMMA = 0x9E3779B97F4A7C15


def splitmix64(x: int) -> int:
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_numbers_are_splitmix64s_in_python():
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # as published
    assert [splitmix64(number * GAMMA) for number in (1, 2, 3)] == known
    for seed, batch, row, stream in ((0, 0, 0, 0), (2**62, 7, 5, 4)):
        keys = keys_of(seed, batch, [row], stream)
        key = seed
        for part in (stream, batch, row):
            key = splitmix64(key + GAMMA ^ splitmix64(part + GAMMA))
        assert keys.item() % 2**64 == key
        bits = [splitmix64(key + number * GAMMA) for number in range(1, 9)]
        assert uniform(keys).tolist() == [((bits[0] >> 12) + 0.5) / 2**52]
        expected = []
        for each in bits:
            radius = math.sqrt(-2 * math.log(((each >> 40) + 0.5) / 2**24))
            angle = 2 * math.pi * (each % 2**32 >> 8) / 2**24
            expected += [radius * math.cos(angle), radius * math.sin(angle)]
        found = normal(keys, (5, 3))  # an odd number
        assert found.dtype == torch.float32 and found.shape == (1, 5, 3)
        assert found.flatten().tolist() == pytest.approx(expected[:15], abs=1e-4)


@pytest.mark.parametrize("bits", [0, -1, -(2**40), 2**32 - 1])
def test_no_bits_give_infinity(bits, monkeypatch):
    monkeypatch.setattr(counter_rng, "_bits", lambda keys, n, *_: torch.full((len(keys), n), bits))
    key = torch.tensor([0])
    assert 0 < uniform(key).item() < 1 and torch.special.ndtri(uniform(key)).isfinite()
    assert normal(key, (2,)).abs().max() < 6


def corrupted(objective: FlowMatching, latents: torch.Tensor, batch: int = 0, rows=None, of=None):
    rows = list(range(len(latents))) if rows is None else rows
    return objective.add_noise(
        latents, torch.tensor(batch), torch.tensor(rows), torch.tensor(of or len(latents))
    )


def some_latents(rows: int = 6, frames: int = 10, channels: int = 8) -> torch.Tensor:
    return torch.randn(rows, frames, channels, generator=torch.Generator().manual_seed(0))


def test_noise_and_velocity():
    latents = some_latents()
    velocity, noise = FlowMatching(), FlowMatching(prediction="noise")
    noisy, other = corrupted(velocity, latents, 3), corrupted(noise, latents, 3)
    assert torch.equal(other.latents, noisy.latents) and torch.equal(other.t, noisy.t)
    t, target = noisy.t[:, None, None], other.target
    assert torch.equal(target, normal(keys_of(0, 3, 6, 0), (10, 8)))
    torch.testing.assert_close(noisy.latents, (1 - t) * latents + t * target, rtol=0, atol=1e-6)
    torch.testing.assert_close(noisy.target, target - latents, rtol=0, atol=1e-6)
    assert velocity.velocity(noisy.target, noisy.latents, noisy.t) is noisy.target
    found = noise.velocity(target, noisy.latents, noisy.t)
    torch.testing.assert_close(found, noisy.target, rtol=0, atol=1e-4)
    # At t = 1 the identity is 0 / 0. An error of the prediction moves the sample by no more than itself
    # in a first step of 1/10.
    one, error = torch.ones(len(latents)), torch.full_like(target, 0.01)
    assert torch.equal(noise.velocity(target, target, one), torch.zeros_like(target))
    for step, smallest in ((0.1, {"smallest_step": 0.1}), (1e-3, {})):
        moved = step * noise.velocity(target + error, target, one, **smallest)
        torch.testing.assert_close(moved, error, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "given", [{}, {"time_distribution": "uniform"}, {"logit_mean": 0.6, "logit_std": 0.7}]
)
def test_times_are_stratified_and_follow_the_distribution(given):
    n, of_rows = 48, []
    objective = FlowMatching(**given)
    for batch in range(100):
        t = objective.sample_times(torch.tensor(batch), torch.arange(n), torch.tensor(n))
        assert t.dtype == torch.float32 and 0 < t.min() and t.max() < 1
        u = t.double()  # mapped back to uniform numbers
        if objective.time_distribution == "logit_normal":
            mean, deviation = given.get("logit_mean", 0.0), given.get("logit_std", 1.0)
            u = torch.special.ndtr((torch.logit(u) - mean) / deviation)
        # Exactly one time in each of n equal parts of the distribution, whichever rows have them.
        taken = (u * n).floor().long()
        assert torch.equal(taken.sort().values, torch.arange(n))
        of_rows.append(taken.double())
    # No row, hence no rank, has a band of its own: over 100 batches their means are alike.
    means = torch.stack(of_rows).mean(0)
    assert (means - (n - 1) / 2).abs().max() < 4 * n / math.sqrt(12 * 100)


def test_rows_are_permuted_for_every_size():
    for size in (*range(1, 60), 510510):
        rows, seen = torch.arange(size), set()
        for batch in range(12 if size < 200 else 2):
            keys = stream_keys(5, torch.tensor(batch), torch.zeros_like(rows), 4)
            positions = permuted(rows, keys, torch.tensor(size))
            assert torch.equal(positions.sort().values, rows), size
            assert torch.equal(permuted(rows[3:5], keys[3:5], size), positions[3:5])
            seen.add(tuple(positions[:3].tolist()))
        assert len(seen) > 6 or size in (1, 2, 3, 4, 510510)


def test_time_and_dropout_have_streams_of_their_own():
    n, latents = 2000, torch.zeros(2000, 1, 2)
    dropout = dict(text_dropout=0.1, speaker_dropout=0.3, caption_dropout=0.2)
    objective = FlowMatching("velocity", "uniform", **dropout, seed=4)
    noisy = corrupted(objective, latents, 6)
    drawn = [uniform(keys_of(4, 6, n, stream)) for stream in range(6)]
    stratum = permuted(torch.arange(n), keys_of(4, 6, [0] * n, 4), n)
    assert torch.equal(noisy.t, ((stratum + drawn[1]) / n).float())
    logit_normal = FlowMatching(seed=4).sample_times(torch.tensor(6), torch.arange(n), n)
    assert torch.equal(logit_normal.argsort(), noisy.t.argsort())
    assert torch.equal(noisy.keep_text, drawn[2] >= 0.1)
    assert torch.equal(noisy.keep_speaker, drawn[3] >= 0.3)
    assert torch.equal(noisy.keep_caption, drawn[5] >= 0.2)
    # Independent of each other: all eight cases come as often as chance has them.
    case = torch.stack(noisy.keep).float().T @ torch.tensor([1.0, 2.0, 4.0])
    for number, kept in enumerate(itertools.product((0.2, 0.8), (0.3, 0.7), (0.1, 0.9))):
        assert abs((case == number).float().mean() - math.prod(kept)) < 0.03


def test_corruption_does_not_depend_on_split_or_padding():
    latents = some_latents()
    whole = corrupted(FlowMatching(seed=9), latents, batch=2)
    longer = torch.nn.functional.pad(latents, (0, 0, 0, 5))
    for rows in ([0, 1], [2], [3, 4, 5]):
        part = corrupted(FlowMatching(seed=9), longer[rows], batch=2, rows=rows, of=6)
        for name in ("t", "keep_text", "keep_speaker", "keep_caption"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name
        for name in ("latents", "target"):
            assert torch.equal(getattr(part, name)[:, :10], getattr(whole, name)[rows]), name


def test_objective_from_the_config():
    given = {"prediction": "noise", "time_distribution": "uniform", "logit_mean": 0.5}
    given |= {"logit_std": 2.0, "text_dropout": 0.2, "speaker_dropout": 0.4}
    options = [f"--objective.{name}={value}" for name, value in given.items()]
    found = build_objective(load_config([*options, "--data.seed=11"]))
    assert found == FlowMatching(**given, seed=11)
    assert build_objective(load_config([])) == FlowMatching()


def test_the_loss_is_a_sum_per_row_without_padding():
    prediction, target, frames = some_latents(4), some_latents(4).roll(1, 0), [10, 3, 7, 1]
    mask = until(frames, 10)
    whole = squared_error_sums(prediction, target, mask)
    for row, length in enumerate(frames):
        error = (prediction[row, :length] - target[row, :length]).square().mean(1).sum()
        assert whole[row].item() == pytest.approx(error.item(), rel=1e-5)
    for garbage in (math.nan, 1e4):
        prediction[~mask] = garbage
        assert torch.equal(squared_error_sums(prediction, target, mask), whole)
    prediction.requires_grad_()
    squared_error_sums(prediction, target, mask).sum().backward()
    assert not prediction.grad[~mask].any() and prediction.grad[mask].all()
    ones = torch.ones(1, 4096, 1, dtype=torch.bfloat16)  # summed in float32
    [loss] = squared_error_sums(ones, torch.zeros_like(ones), ones[..., 0].bool())
    assert loss.dtype == torch.float32 and loss == 4096

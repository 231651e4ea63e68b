"""The objective and its randomness keyed by position."""

import math

import pytest
import torch

from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.flow import counter_rng
from torchtitan.models.dit_tts.flow.counter_rng import (
    _bits,
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


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1].item()


def kolmogorov_smirnov(values: torch.Tensor) -> float:
    """Greatest distance of the values' distribution from the uniform one on (0, 1)."""
    values = values.double().sort().values
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    return max((steps[1:] - values).max().item(), (values - steps[:-1]).max().item())


def test_splitmix64_known_answers_and_distinct_keys():
    bits = _bits(torch.tensor([0]), 3)[0]
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [value % 2**64 for value in bits.tolist()] == known
    keys = torch.cat(
        [
            keys_of(seed, batch, 16, stream)
            for seed in (0, 1, 2, 2**62)
            for batch in range(16)
            for stream in range(4)
        ]
    )
    assert keys.unique().numel() == keys.numel()


@pytest.mark.parametrize("bits", [0, -1, -(2**40), 2**32 - 1])
def test_no_bits_give_infinity(bits, monkeypatch):
    monkeypatch.setattr(counter_rng, "_bits", lambda keys, n: torch.full((len(keys), n), bits))
    key = torch.tensor([0])
    assert 0 < uniform(key).item() < 1 and torch.special.ndtri(uniform(key)).isfinite()
    assert normal(key, (2,)).abs().max() < 6


def test_normal_moments():
    z = normal(keys_of(0, 0, 64), (50, 128))
    assert z.dtype == torch.float32 and z.shape == (64, 50, 128)
    z = z.double()
    n = z.numel()
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.std() - 1) < 4 / math.sqrt(2 * n)
    assert abs(z.pow(3).mean()) < 4 * math.sqrt(15 / n)
    assert abs(z.pow(4).mean() - 3) < 4 * math.sqrt(96 / n)
    assert kolmogorov_smirnov(torch.special.ndtr(z.flatten())) < 1.95 / math.sqrt(n)


@pytest.mark.parametrize("other", [{"rows": [1]}, {"batch": 1}, {"seed": 1}, {"stream": 1}])
def test_normal_is_independent_across(other):
    shape, one = (400, 128), {"seed": 0, "batch": 0, "rows": [0]}
    a = normal(keys_of(**one), shape)
    b = normal(keys_of(**one | other), shape)
    bound = 4.5 / math.sqrt(a.numel())
    assert abs(correlation(a, b)) < bound
    assert abs(correlation(a.square(), b.square())) < bound


def test_normal_is_independent_within_a_row():
    z = normal(keys_of(5, 3, [2]), (400, 128))[0]
    bound = 4.5 / math.sqrt(z.numel() / 2)
    flat = z.flatten()
    # Lag 1 holds the cosine and the sine of one pair.
    for lag in (1, 2, 3, 128, 256):
        assert abs(correlation(flat[:-lag], flat[lag:])) < bound
        assert abs(correlation(flat[:-lag].square(), flat[lag:].square())) < bound
    assert abs(correlation(flat[0::2].square(), flat[1::2].square())) < bound


@pytest.mark.parametrize("channels", [128, 5])
def test_longer_padding_leaves_earlier_frames(channels):
    keys = keys_of(0, 7, 3)
    assert torch.equal(normal(keys, (31, channels))[:, :9], normal(keys, (9, channels)))


def corrupted(objective: FlowMatching, latents: torch.Tensor, batch: int = 0, rows=None, of=None):
    rows = list(range(len(latents))) if rows is None else rows
    return objective.add_noise(
        latents, torch.tensor(batch), torch.tensor(rows), torch.tensor(of or len(latents))
    )


def some_latents(rows: int = 6, frames: int = 10, channels: int = 8) -> torch.Tensor:
    return torch.randn(rows, frames, channels, generator=torch.Generator().manual_seed(0))


def test_identities_of_velocity_and_noise():
    latents = some_latents()
    noisy = corrupted(FlowMatching(), latents)
    noise = corrupted(FlowMatching(prediction="noise"), latents)
    assert torch.equal(noise.latents, noisy.latents) and torch.equal(noise.t, noisy.t)
    t = noisy.t[:, None, None]
    torch.testing.assert_close(noisy.latents - t * noisy.target, latents, rtol=0, atol=1e-5)
    sum_ = noisy.latents + (1 - t) * noisy.target
    torch.testing.assert_close(sum_, noise.target, rtol=0, atol=1e-5)
    assert noise.target.std() == pytest.approx(1, abs=0.15)


def test_velocity_from_either_prediction():
    latents = some_latents()
    velocity, noise = FlowMatching(), FlowMatching(prediction="noise")
    noisy = corrupted(velocity, latents)
    assert velocity.velocity(noisy.target, noisy.latents, noisy.t) is noisy.target
    target = corrupted(noise, latents).target
    found = noise.velocity(target, noisy.latents, noisy.t)
    torch.testing.assert_close(found, noisy.target, rtol=0, atol=1e-4)
    # At t = 1 the identity is 0 / 0. An error of the prediction moves the sample by no more than itself
    # in a first step of 1/10.
    one, error = torch.ones(len(latents)), torch.full_like(target, 0.01)
    assert torch.equal(noise.velocity(target, target, one), torch.zeros_like(target))
    moved = 0.1 * noise.velocity(target + error, target, one, smallest_step=0.1)
    torch.testing.assert_close(moved, error, rtol=0, atol=1e-5)


def strata(objective: FlowMatching, t: torch.Tensor) -> torch.Tensor:
    """Times mapped back to uniform numbers."""
    if objective.time_distribution == "uniform":
        return t.double()
    return torch.special.ndtr(
        (torch.logit(t.double()) - objective.logit_mean) / objective.logit_std
    )


@pytest.mark.parametrize(
    "objective",
    [
        FlowMatching(),
        FlowMatching(time_distribution="uniform"),
        FlowMatching(logit_mean=0.6, logit_std=0.7),
    ],
    ids=["logit_normal", "uniform", "shifted"],
)
def test_times_are_stratified_and_follow_the_distribution(objective):
    n, pooled, of_rows = 48, [], []
    for batch in range(100):
        t = objective.sample_times(torch.tensor(batch), torch.arange(n), torch.tensor(n))
        assert t.dtype == torch.float32 and 0 < t.min() and t.max() < 1
        u = strata(objective, t)
        # Exactly one time in each of n equal parts of the distribution, whichever rows have them.
        taken = (u * n).floor().long()
        assert torch.equal(taken.sort().values, torch.arange(n))
        pooled.append(u)
        of_rows.append(taken.double())
    # Within a stratum the place is uniform, else a mean would be biased.
    places = torch.cat(pooled) * n % 1
    assert kolmogorov_smirnov(places) < 1.95 / math.sqrt(len(places))
    assert kolmogorov_smirnov(torch.cat(pooled)) < 1 / n
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


def test_the_mean_of_the_logit_moves_with_the_progress():
    rows, n = torch.arange(200), torch.tensor(200)

    def mean(objective: FlowMatching, *progress) -> float:
        t = objective.sample_times(torch.tensor(3), rows, n, *progress)
        return torch.logit(t.double()).mean().item()

    moving = FlowMatching(logit_mean=0.5, logit_mean_end=-1.0)
    for progress, expected in ((0.0, 0.5), (0.5, -0.25), (torch.tensor(1.0), -1.0)):
        assert mean(moving, progress) == pytest.approx(expected, abs=0.01)
        assert mean(FlowMatching(logit_mean=0.5), progress) == mean(FlowMatching(logit_mean=0.5))


def test_condition_dropout_rates_and_independence():
    objective = FlowMatching(time_distribution="uniform", text_dropout=0.1, speaker_dropout=0.3)
    latents, drawn = torch.zeros(500, 1, 2), []
    for batch in range(100):
        noisy = corrupted(objective, latents, batch)
        place = noisy.t.double() * 500 % 1
        noise = noisy.latents[:, 0] / noisy.t[:, None]
        kept = [~noisy.keep_text, ~noisy.keep_speaker]
        drawn.append(torch.stack([*kept, noisy.t, place, noise[:, 0], noise.norm(dim=1)]))
    text, speaker, *others = torch.cat(drawn, dim=1).double()
    n = len(text)
    assert text.mean().item() == pytest.approx(0.1, abs=4 * math.sqrt(0.1 * 0.9 / n))
    assert speaker.mean().item() == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / n))
    assert abs(correlation(text, speaker)) < 4 / math.sqrt(n)
    # Neither goes with the time, its place within the stratum, or the noise.
    for other in others:
        assert abs(correlation(text, other)) < 4 / math.sqrt(n)
        assert abs(correlation(speaker, other)) < 4 / math.sqrt(n)
    # Nor does the time with the noise, whose radius and angle come from bits of their own.
    _, place, *noise = others
    assert all(abs(correlation(place, other)) < 4 / math.sqrt(n) for other in noise)


def test_corruption_does_not_depend_on_split_or_padding():
    latents = some_latents()
    whole = corrupted(FlowMatching(seed=9), latents, batch=2)
    longer = torch.nn.functional.pad(latents, (0, 0, 0, 5))
    for rows in ([0, 1], [2], [3, 4, 5]):
        part = corrupted(FlowMatching(seed=9), longer[rows], batch=2, rows=rows, of=6)
        for name in ("t", "keep_text", "keep_speaker"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name
        for name in ("latents", "target"):
            assert torch.equal(getattr(part, name)[:, :10], getattr(whole, name)[rows]), name


def test_objective_from_the_config():
    given = {"prediction": "noise", "time_distribution": "uniform", "logit_mean": 0.5}
    given |= {"logit_std": 2.0, "logit_mean_end": -1.0, "text_dropout": 0.2, "speaker_dropout": 0.4}
    options = [f"--objective.{name}={value}" for name, value in given.items()]
    found = build_objective(load_config([*options, "--data.seed=11"]))
    assert found == FlowMatching(**given, seed=11)
    assert build_objective(load_config([])) == FlowMatching()


def test_loss_sums_over_any_split_and_leaves_padding_out():
    prediction, target = some_latents(4), some_latents(4).roll(1, 0)
    mask = torch.arange(10) < torch.tensor([10, 3, 7, 1])[:, None]
    whole = squared_error_sums(prediction, target, mask)
    for rows in ([0], [1, 2], [3]):
        part = squared_error_sums(prediction[rows], target[rows], mask[rows])
        torch.testing.assert_close(part, whole[rows])
    for row, frames in enumerate([10, 3, 7, 1]):
        error = (prediction[row, :frames] - target[row, :frames]).square().mean(1).sum()
        assert whole[row].item() == pytest.approx(error.item(), rel=1e-5)


@pytest.mark.parametrize("garbage", [1e4, math.nan])
def test_padding_has_neither_loss_nor_gradient(garbage):
    target = some_latents(2)
    mask = torch.arange(10) < torch.tensor([10, 4])[:, None]
    prediction = torch.zeros_like(target)
    clean = squared_error_sums(prediction, target, mask).sum()
    prediction[~mask] = garbage
    prediction.requires_grad_()
    loss = squared_error_sums(prediction, target, mask).sum()
    assert torch.equal(loss, clean)
    if math.isfinite(garbage):
        loss.backward()
        assert not prediction.grad[~mask].any() and prediction.grad[mask].all()
    frames = torch.ones(1, 4096, 1, dtype=torch.bfloat16)  # summed in float32
    loss = squared_error_sums(frames, torch.zeros_like(frames), frames[..., 0].bool()).sum()
    assert loss.dtype == torch.float32 and loss == 4096

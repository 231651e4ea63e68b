"""Bad steps are found by the spread of the steps before, and a sound run has none."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tools.harness.forked import run_ranks
from torchtitan.models.dit_tts.config.job_config import Divergence
from torchtitan.models.dit_tts.infra.divergence import (
    HARD_LIMIT_FACTOR,
    LOSS_FACTOR,
    MIN_HISTORY,
    NORM_FACTOR,
    WINDOW,
    DivergenceGuard,
    recent_median,
    spike_limit,
)

SIGMAS = Divergence().spike_sigmas
CURVES = json.loads(Path(__file__).with_name("recorded_curves.json").read_text())
"""name -> loss and gradient norm of every step of a real run, which was not stopped"""


def judged(guard: DivergenceGuard, step: int, loss: float, norm: float) -> bool:
    left_out = guard.judge(step, step - 1, torch.tensor(loss), torch.tensor(norm))
    stats = guard.read()
    assert bool(left_out) == stats.bad
    assert (stats.step, stats.global_batch) == (step, step - 1)
    assert guard.read() is None
    return stats.bad


def guard_after(steps: int, sigmas: float = SIGMAS, loss: float = 1.0) -> DivergenceGuard:
    guard = DivergenceGuard(sigmas)
    for step in range(1, steps + 1):
        assert not judged(guard, step, loss * (1 + 0.01 * (step % 3)), 0.5)
    return guard


def test_limit_by_hand():
    logs = [math.log(2.0) + 0.1 * (number % 5 - 2) for number in range(MIN_HISTORY * 2)]
    # Neighbours differ by 0.1, four times, and by 0.4. The last 16 have the values 2, -2, -1, 0, 1 in turn.
    level = 2.0 * math.exp(0.1 * np.median([number % 5 - 2 for number in range(48, 64)]))
    expected = level * math.exp(10 * 1.4826 * 0.1 / math.sqrt(2))
    assert spike_limit(logs, 10, 2.0, 100.0) == pytest.approx(expected)
    assert spike_limit(logs, 10, 20.0, 100.0) == pytest.approx(level * 20.0)
    assert spike_limit(logs, 100, 2.0, 100.0) == pytest.approx(level * 100.0)
    lowest = math.log(level / 4)
    assert spike_limit(logs, 10, 20.0, 100.0, lowest) == pytest.approx(5 * level / 4)
    highest = [math.log(50.0), *logs[1:]]
    assert spike_limit(highest, 10, 2.0, 100.0) == pytest.approx(1.25 * 50.0)
    assert spike_limit(logs[: MIN_HISTORY - 1], 10, 2.0, 100.0) == pytest.approx(level * 100.0)
    assert spike_limit(logs[:1], 10, 2.0, math.inf) == math.inf
    assert recent_median([0.0] * 64 + [1.0] * 16) == 1.0
    assert spike_limit([], 10, 2.0, 100.0) == math.inf == spike_limit(logs, 0, 2.0, 100.0)


@pytest.mark.parametrize("history", [0, 5, 200])
@pytest.mark.parametrize("sigmas", [0.0, SIGMAS])
@pytest.mark.parametrize(
    "loss, norm", [(math.nan, 0.5), (math.inf, 0.5), (1.0, math.nan), (1.0, math.inf)]
)
def test_what_is_not_finite_is_bad_at_any_step(history, sigmas, loss, norm):
    guard = guard_after(history, sigmas)
    assert judged(guard, history + 1, loss, norm)
    assert not judged(guard, history + 2, 1.0, 0.5)


@pytest.mark.parametrize(
    "loss, norm, bad",
    [
        (LOSS_FACTOR * 1.02, 0.5, True),
        (LOSS_FACTOR * 0.98, 0.5, False),
        (0.001, 0.001, False),  # to be better than before is no mistake
        (1.0, NORM_FACTOR * 0.51, True),
        (1.0, NORM_FACTOR * 0.49, False),
    ],
)
def test_spikes_after_some_steps(loss, norm, bad):
    assert judged(guard_after(MIN_HISTORY), MIN_HISTORY + 1, loss, norm) is bad


def test_before_there_is_a_spread_only_an_absurd_loss_is_a_spike():
    guard = guard_after(1)
    assert not judged(guard, 2, 0.9 * HARD_LIMIT_FACTOR, 1e6)
    assert judged(guard_after(1), 2, 1.1 * HARD_LIMIT_FACTOR, 1.0)


def test_bad_steps_do_not_raise_the_limits():
    guard = guard_after(MIN_HISTORY)
    assert all(judged(guard, MIN_HISTORY + 1 + step, 5.0, 0.5) for step in range(2 * WINDOW))


@pytest.mark.parametrize("steps", [0, 3, WINDOW + 40])
def test_a_resumed_guard_judges_alike(steps):
    guard, resumed = guard_after(steps), DivergenceGuard(SIGMAS)
    resumed.load_state_dict(guard.state_dict())
    for step in range(steps + 1, steps + 60):
        loss = 1.0 + 0.05 * (step % 7)
        for each in (guard, resumed):
            assert not judged(each, step, loss, 0.5)
        assert resumed.losses == guard.losses and resumed.norms == guard.norms


def test_a_resumed_guard_knows_a_level_that_is_long_past():
    """It compares with the lowest of the run: half as much again at a time is no spike."""
    guard, resumed = guard_after(64), DivergenceGuard(SIGMAS)
    for step in range(64, 64 + 2 * WINDOW):
        assert not judged(guard, step, min(1.02 ** (step - 64), 3.0), 0.5)
    resumed.load_state_dict(guard.state_dict())
    assert judged(guard, 400, 6.0, 0.5) and judged(resumed, 400, 6.0, 0.5)


def test_bad_steps_are_counted_among_the_last():
    guard = guard_after(3)
    for step in range(4, 7):
        judged(guard, step, math.nan, 1.0)
    assert guard.bad_recently == 3
    resumed = DivergenceGuard(SIGMAS)
    resumed.load_state_dict(guard.state_dict())
    for step in range(7, 7 + 31):
        assert not judged(resumed, step, 1.0, 0.5)
    assert resumed.bad_recently == 1


def judge_on_two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    guard, norm = DivergenceGuard(SIGMAS), torch.tensor(0.5)
    # Bad on both ranks, on one, whose norm is rounded differently, and on none.
    for step, bad in enumerate(((0, 1), (1,), ()), 1):
        loss = torch.tensor(math.nan if rank in bad else 1.0)
        left_out = guard.judge(step, step - 1, loss, norm, dist.group.WORLD)
        assert left_out == float(bool(bad)) == guard.read().bad  # optimizers compare with 1
        assert guard.bad_recently == min(step, 2)
    dist.destroy_process_group()


@pytest.mark.long
def test_ranks_judge_alike(tmp_path):
    run_ranks(judge_on_two_ranks, 2, str(tmp_path))


def curve(steps: int, seed: int = 0) -> np.ndarray:
    """Losses that stay where they are, with a noise of 3 %."""
    return 0.5 * np.exp(0.03 * np.random.default_rng(seed).standard_normal(steps))


@pytest.mark.parametrize("growth", [1.01, 1.05, 1.2])
def test_a_loss_that_grows_is_found_however_slowly(growth):
    guard, steps = DivergenceGuard(SIGMAS), 64
    for step, loss in enumerate(curve(steps).tolist(), 1):
        assert not judged(guard, step, loss, 1.0)
    grown = [loss * growth**step for step, loss in enumerate(curve(300, seed=1))]
    found = next(loss for loss in grown if judged(guard, steps, float(loss), 1.0))
    assert found < 0.5 * 5 * 1.3


def test_a_rare_kind_of_batch_is_trained():
    """One in twenty has 2.3 times the loss of the others."""
    guard = DivergenceGuard(SIGMAS)
    for step, loss in enumerate(curve(400).tolist(), 1):
        assert not judged(guard, step, loss * (2.3 if step % 20 == 19 else 1.0), 1.0)


@pytest.mark.parametrize("name", CURVES)
def test_no_false_alarm_on_recorded_curves(name):
    guard = DivergenceGuard(SIGMAS)
    for step, (loss, norm) in enumerate(zip(*CURVES[name], strict=True), 1):
        assert not judged(guard, step, loss, norm), f"{name}, step {step}"


@pytest.mark.parametrize("name", CURVES)
def test_planted_spikes_are_found_in_recorded_curves(name):
    """The loss of a model that has collapsed: several times what predicting nothing costs."""
    losses, norms = CURVES[name]
    collapsed = 5 * max(losses[:3] if name != "finetune" else [2.0])
    random = np.random.default_rng(0)
    for at in random.integers(MIN_HISTORY, len(losses), 20).tolist():
        guard = DivergenceGuard(SIGMAS)
        for step, (loss, norm) in enumerate(zip(losses[:at], norms[:at], strict=True), 1):
            judged(guard, step, loss, norm)
        assert judged(guard, at + 1, collapsed, norms[at]), at
        assert judged(guard, at + 1, losses[at], 1000 * max(norms)), at

"""Bad steps are found by the spread of the steps before, and a sound run has none."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torchtitan.models.dit_tts.config.run_sections import BAD_STEPS_WINDOW, Divergence
from torchtitan.models.dit_tts.infra.divergence import (
    MIN_HISTORY,
    WINDOW,
    DivergenceGuard,
    spike_limit,
)

SIGMAS = Divergence().spike_sigmas
CURVES = json.loads(Path(__file__).with_name("recorded_curves.json").read_text())
"""name -> loss and gradient norm of every step of a real run, which was not stopped"""


def judged(guard: DivergenceGuard, step: int, loss: float, norm: float) -> bool:
    skipped = guard.judge(step, step - 1, torch.tensor(loss), torch.tensor(norm))
    stats = guard.read()
    assert float(skipped) == stats.bad and guard.read() is None
    assert (stats.step, stats.global_batch) == (step, step - 1)
    return stats.bad


def guard_after(steps: int, sigmas: float = SIGMAS) -> DivergenceGuard:
    guard = DivergenceGuard(sigmas)
    for step in range(1, steps + 1):
        assert not judged(guard, step, 1 + 0.01 * (step % 3), 0.5)
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
    # The level is the median of the last 16 values; while the loss falls, earlier ones would let spikes pass.
    falling = [math.log(8.0)] * 40 + [math.log(2.0)] * 16
    assert spike_limit(falling, 1, 1.0, 2.0) == pytest.approx(2 * 2.0)
    assert spike_limit([*falling, *[math.log(1.0)] * 9], 1, 1.0, 2.0) == pytest.approx(2 * 1.0)
    assert spike_limit(logs[:1], 10, 2.0, math.inf) == math.inf
    assert spike_limit([], 10, 2.0, 100.0) == math.inf == spike_limit(logs, 0, 2.0, 100.0)


@pytest.mark.parametrize("history", [0, 5, 200])
@pytest.mark.parametrize("sigmas", [0.0, SIGMAS])
@pytest.mark.parametrize("loss, norm", [(math.nan, 0.5), (1.0, math.nan), (1.0, math.inf)])
def test_values_that_are_not_finite_are_bad_at_any_step(history, sigmas, loss, norm):
    guard = guard_after(history, sigmas)
    assert judged(guard, history + 1, loss, norm)
    assert not judged(guard, history + 2, 1.0, 0.5)


@pytest.mark.parametrize(
    "history, loss, norm, bad",
    [
        (MIN_HISTORY, 3.06, 0.5, True),
        (MIN_HISTORY, 2.94, 0.5, False),
        (MIN_HISTORY, 0.001, 0.001, False),  # better than before
        (MIN_HISTORY, 1.0, 10.2, True),
        (MIN_HISTORY, 1.0, 9.8, False),
        (1, 90.0, 1e6, False),  # without a spread the loss alone is judged, by the hard limit
        (1, 110.0, 1.0, True),
    ],
)
def test_spikes_after_some_steps(history, loss, norm, bad):
    assert judged(guard_after(history), history + 1, loss, norm) is bad


def test_bad_steps_do_not_raise_the_limits():
    guard = guard_after(MIN_HISTORY)
    assert all(judged(guard, MIN_HISTORY + 1 + step, 5.0, 0.5) for step in range(2 * WINDOW))


@pytest.mark.parametrize("steps", [0, 3, WINDOW + 40])
def test_a_resumed_guard_judges_alike(steps):
    guard, resumed = guard_after(steps), DivergenceGuard(SIGMAS)
    resumed.load_state_dict(guard.state_dict())
    for step in range(2 * WINDOW):  # the loss rises slowly, far above the run's lowest level
        loss = 1.0 + 0.05 * (step % 7) if step < 60 else min(1.02 ** (step - 60), 3.0)
        for each in (guard, resumed):
            assert not judged(each, steps + step + 1, loss, 0.5)
        assert resumed.losses == guard.losses and resumed.norms == guard.norms
    resumed = DivergenceGuard(SIGMAS)
    resumed.load_state_dict(guard.state_dict())
    assert judged(guard, 1000, 6.0, 0.5) and judged(resumed, 1000, 6.0, 0.5)


def test_a_step_that_is_bad_on_one_rank_is_bad_on_all(monkeypatch):
    def reduce_with_a_bad_rank(bad, op, group):
        assert op == dist.ReduceOp.MAX and group == "all ranks"
        bad.clamp_(min=1.0)

    monkeypatch.setattr(dist, "all_reduce", reduce_with_a_bad_rank)
    guard = DivergenceGuard(SIGMAS)
    skipped = guard.judge(1, 0, torch.tensor(1.0), torch.tensor(0.5), "all ranks")
    assert skipped == 1.0 and guard.read().bad and guard.bad_recently == 1
    resumed = DivergenceGuard(SIGMAS)
    resumed.load_state_dict(guard.state_dict())
    assert resumed.bad_recently == 1
    for step in range(2, 2 + BAD_STEPS_WINDOW):  # counted among the last steps alone
        assert resumed.bad_recently == 1
        assert not judged(resumed, step, 1.0, 0.5)
    assert resumed.bad_recently == 0


@pytest.mark.parametrize("name", CURVES)
def test_recorded_curves_have_no_false_alarm_and_planted_spikes_are_found(name):
    losses, norms = CURVES[name]
    # The loss of a collapsed model is several times the cost of predicting nothing.
    collapsed = 5 * max(losses[:3] if name != "finetune" else [2.0])
    planted = set(np.random.default_rng(0).integers(MIN_HISTORY, len(losses), 20).tolist())
    guard = DivergenceGuard(SIGMAS)
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        if step in planted:
            assert judged(guard, step, collapsed, norm), step
            assert judged(guard, step, loss, 1000 * max(norms)), step
        assert not judged(guard, step, loss, norm), step

"""Schedules, the plan of the steps, and the solvers on flows whose solution is known."""

import math
from itertools import pairwise

import pytest
import torch

from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.flow.solvers import (
    SOLVERS,
    Solver,
    first_way,
    integrate,
    network_passes,
    plan_steps,
    schedule_times,
    swayed,
)

MAX_SWAY = 2 / (math.pi - 2)


def test_sway():
    """At -1 it is a cosine; the times fall within the limits of the coefficient."""
    times = schedule_times(Sampling(steps=9, schedule="sway"))
    assert times == pytest.approx([math.cos(math.pi / 2 * k / 9) for k in range(10)], abs=1e-12)
    assert swayed(0.3, 0.0) == 0.3
    # By hand: t = 1/2 loses s·(cos(π/4) - 1/2).
    assert swayed(0.5, 1.0) == pytest.approx(1 - math.sqrt(0.5))
    fall = {-1: True, 0.5: True, MAX_SWAY: True, -1.1: False, 2: False}
    for coefficient, falls in fall.items():
        times = schedule_times(Sampling(steps=1000, schedule="sway", sway=coefficient))
        assert times[0] == 1.0 and times[-1] == 0.0
        assert all(t > end for t, end in pairwise(times)) == falls


def test_sampling_may_start_below_the_noise():
    assert schedule_times(Sampling(steps=2, start_t=0.8)) == pytest.approx([0.8, 0.4, 0.0])
    whole, scaled = (Sampling(steps=5, schedule="sway", start_t=t) for t in (1.0, 0.999))
    assert schedule_times(scaled) == pytest.approx([0.999 * t for t in schedule_times(whole)])


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        (1 / 4, {}),
        (0.999 / 4, {"start_t": 0.999}),  # not 1 - 0.999
        (0.8 / 4, {"solver": "midpoint", "start_t": 0.8}),  # half of the first of two steps
        (1 / 2, {"solver": "heun"}),
        (0.5, {"steps": 1, "start_t": 0.5}),
    ],
)
def test_the_first_way_leads_to_the_next_evaluation(way, settings):
    sampling = Sampling(**{"steps": 4, "schedule": "linear"} | settings)
    assert first_way(plan_steps(sampling)) == pytest.approx(way, rel=1e-12)


def test_each_solver_is_its_rule_written_out():
    """Of x' = x²·t, whose rate depends on both, in uneven steps."""

    def f(x, t):
        return x**2 * t

    rules = {
        "euler": lambda x, t, h: f(x, t),
        "midpoint": lambda x, t, h: f(x + h / 2 * f(x, t), t + h / 2),
        "heun": lambda x, t, h: (f(x, t) + f(x + h * f(x, t), t + h)) / 2,
    }
    for solver, rule in rules.items():
        x, count = 1.0, 1 if solver == "euler" else 2  # evaluations
        settings = Sampling(steps=5 * count, solver=solver, schedule="sway")
        for t, end in pairwise(schedule_times(settings)):
            x += (end - t) * rule(x, t, end - t)
        start = torch.ones(1, 1, 1, dtype=torch.float64)
        steps = plan_steps(settings)
        found = integrate(lambda x, t, step: f(x, t), start, steps, SOLVERS[solver])
        assert found.item() == pytest.approx(x, rel=1e-12)


def test_a_solver_of_several_steps():
    """Adams and Bashforth's of two steps is exact where the velocity is linear in t, from the second step on;
    each sampling has a history of its own."""

    def advance(velocity, x, step, history):
        slope = velocity(x, step.times[0], step)
        history.append((step, slope))
        if len(history) == 1:
            return x + step.width * slope
        before, earlier = history[-2]
        ratio = step.width / before.width
        return x + step.width * ((1 + ratio / 2) * slope - ratio / 2 * earlier)

    steps, solver = plan_steps(Sampling(steps=4, schedule="sway")), Solver(None, advance)
    for _ in range(2):
        found = integrate(
            lambda x, t, step: t * torch.ones_like(x), torch.zeros(1, 1, 1), steps, solver
        )
        t = steps[1].times[
            0
        ]  # x loses (1 - t) in the first step, and from there on the integral of t
        assert found.item() == pytest.approx(t - 1 - t**2 / 2)


def test_steps_are_evaluations():
    for solver, expected in (
        ("euler", [1.0, 0.75, 0.5, 0.25]),
        ("midpoint", [1.0, 0.75, 0.5, 0.25]),
        ("heun", [1.0, 0.5, 0.5, 0.0]),
    ):
        steps = plan_steps(Sampling(steps=4, solver=solver, text_scale=0.0))
        assert [t for step in steps for t in step.times] == expected
        assert sum(step.width for step in steps) == -1.0
        assert network_passes(steps) == 4


@pytest.mark.parametrize(
    "settings, passes",
    [
        ({}, 8 + 4),  # the run's guidance: text, at 1 to 5/8
        ({"speaker_scale": 2.0}, 8 + 4 * 2),
        ({"speaker_scale": 3.0, "guidance": "joint"}, 8 + 4),
        ({"speaker_scale": 2.0, "guidance": "alternating"}, 8 + 4),
        ({"min_t": 0.0}, 8 + 8),
        ({"max_t": 0.875}, 8 + 3),
        ({"min_t": 0.25, "max_t": 0.5, "speaker_scale": 2.0}, 8 + 2 * 2),
        # Guided by the start of the interval: two of four.
        ({"solver": "heun", "speaker_scale": 2.0}, 8 + 2 * 2 * 2),
    ],
)
def test_forwards_that_guidance_takes_and_saves(settings, passes):
    assert network_passes(plan_steps(Sampling(steps=8, **settings))) == passes


def test_the_speakers_keys_are_forced_at_early_times():
    steps = plan_steps(Sampling(steps=4, speaker_kv_scale=1.5, speaker_kv_min_t=0.4))
    assert [step.speaker_kv_scale for step in steps] == [1.5, 1.5, 1.5, 1.0]

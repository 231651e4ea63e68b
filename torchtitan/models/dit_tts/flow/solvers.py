"""Sampling: plans the steps from noise (t = 1) to data (t = 0), and the loop that takes them."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from torchtitan.models.dit_tts.config.job_config import EVALUATIONS_PER_STEP, Sampling
from torchtitan.models.dit_tts.flow.guidance import Branch, branches_at


class Step(NamedTuple):
    """One interval of the schedule."""

    times: tuple[float, ...]
    """at which the velocity is evaluated; the step begins at the first"""

    width: float
    """from its start to its end; negative"""

    branches: tuple[Branch, ...]
    """of guidance, at each of these times"""

    speaker_kv_scale: float = 1.0


Velocity = Callable[[torch.Tensor, float, Step], torch.Tensor]
"""(latents (B, T, C), t, step) to velocity (B, T, C)."""

History = list[tuple[Step, torch.Tensor]]
"""Earlier steps of a sampling with the velocity at the start of each; multistep solvers append to it."""


class Solver(NamedTuple):
    """The rule by which a solver takes a step.

    Attributes:
        times: (start, end) of a step to the times at which the velocity is evaluated, the start first; as many as
            EVALUATIONS_PER_STEP says.
        advance: (velocity, x, step, history) to x (B, T, C) at the step's end. `history` is a list that is empty before
            the first step and that no one else changes.
    """

    times: Callable[[float, float], tuple[float, ...]]
    advance: Callable[[Velocity, torch.Tensor, Step, History], torch.Tensor]


def _runge_kutta(velocity: Velocity, x: torch.Tensor, step: Step, history: History) -> torch.Tensor:
    """Euler's method x + h·v(x, t), and with a second evaluation at t + a·h the method of second order with
    weights 1 - 1/(2a) and 1/(2a) (Hairer, Nørsett and Wanner, Solving Ordinary Differential Equations I,
    section II.1): the midpoint rule for a = 1/2, Heun's for a = 1."""
    begin, *inner = step.times
    slope = velocity(x, begin, step)
    for t in inner:
        weight = step.width / (2.0 * (t - begin))
        second = velocity(x + (t - begin) * slope, t, step)
        slope = (1.0 - weight) * slope + weight * second
    return x + step.width * slope


SOLVERS = {
    "euler": Solver(lambda begin, end: (begin,), _runge_kutta),
    "midpoint": Solver(lambda begin, end: (begin, (begin + end) / 2), _runge_kutta),
    "heun": Solver(lambda begin, end: (begin, end), _runge_kutta),
}


def swayed(t: float, coefficient: float) -> float:
    """Sway sampling (Chen et al. 2024, F5-TTS, arXiv 2410.06885): with u = 1 - t, the fraction
    of the way to the data, u becomes u + s·(cos(π·u/2) - 1 + u). s < 0 moves times towards the noise; at
    s = -1 t becomes cos(π·u/2). From -1 to 2 / (π - 2) the times still fall, and the ends always stay."""
    u = 1.0 - t
    return t - coefficient * (math.cos(math.pi / 2 * u) - t)


def schedule_times(sampling: Sampling) -> list[float]:
    """Begins of all steps from `start_t` on, and 0."""
    intervals = sampling.steps // EVALUATIONS_PER_STEP[sampling.solver]
    times = torch.linspace(1.0, 0.0, intervals + 1, dtype=torch.float64).tolist()
    if sampling.schedule == "sway":
        # exactly 0, without rounding
        times = [*(swayed(t, sampling.sway) for t in times[:-1]), 0.0]
    return [sampling.start_t * t for t in times]


def plan_steps(sampling: Sampling) -> list[Step]:
    """The steps of the solver, each with the guidance at its start."""
    steps = []
    for number, (t, end) in enumerate(pairwise(schedule_times(sampling))):
        is_forced = t > sampling.speaker_kv_min_t + 1e-6
        steps.append(
            Step(
                SOLVERS[sampling.solver].times(t, end),
                end - t,
                branches_at(sampling, number, t),
                sampling.speaker_kv_scale if is_forced else 1.0,
            )
        )
    return steps


def first_way(steps: Sequence[Step]) -> float:
    """From the first time at which the velocity is evaluated to the next time: `smallest_step` of a noise prediction."""
    begin, *inner = steps[0].times
    return begin - inner[0] if inner else -steps[0].width


def network_passes(steps: Sequence[Step]) -> int:
    """Passes of one utterance through the network: one per evaluation and one per branch of guidance."""
    return sum(len(step.times) * (1 + len(step.branches)) for step in steps)


def integrate(
    velocity: Velocity, noise: torch.Tensor, steps: Sequence[Step], solver: Solver
) -> torch.Tensor:
    """The latents (B, T, C) at the end of the steps."""
    x, history = noise, History()
    for step in steps:
        x = solver.advance(velocity, x, step, history)
    return x

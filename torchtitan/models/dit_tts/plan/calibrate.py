"""`--calibrate results.json`: fits the constants of the time to measured runs, by least squares.

Each shape of each run is an observation, and `measured_runs` says how a file holds them. What the model
of time does not know is much the same in all shapes of a run, and in runs of the same kind: a model on
some GPUs, checkpointed and compiled in one way. So the errors of a kind's observations are taken to have
one part in common, `unexplained`, and a small one each; many shapes of one kind tell the constants hardly
better than one. The logarithms of the constants are found that make least

    errors · (their covariance)⁻¹ · errors + ((log constant - log guess) / its deviation)²

with errors = log measured - log predicted, so that constants which the runs do not tell keep their
guesses; `unexplained` is then set to what is left between kinds, and both are repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan.models.dit_tts.config.manager import run_folder_path, upstream_view
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.plan.compiled_block import blocks_compiled
from torchtitan.models.dit_tts.plan.constants import NAMES, UNEXPLAINED, Constants, guesses
from torchtitan.models.dit_tts.plan.devices import cluster_of
from torchtitan.models.dit_tts.plan.forecast import Forecaster, layout_of
from torchtitan.models.dit_tts.plan.grid import checkpointing_name
from torchtitan.models.dit_tts.plan.measured_runs import MeasuredRun, read_runs
from torchtitan.models.dit_tts.plan.step_time import StepWork, log_slopes, step_time

_OWN_ERROR = 0.02
"""relative error of a shape's predicted step that others of its kind of run do not have; a guess"""

_LEAST_UNEXPLAINED = 0.03
"""however well the runs agree: those of other models need not"""

_SEVERAL = 3
"""kinds of runs beyond what the constants take up, from which on less than the guess is believed"""

_ROUNDS = 20


@dataclass(frozen=True)
class Observation:
    """A shape of a measured run."""

    what: str
    kind: str
    """of run; observations of one kind have an error in common"""

    seconds: float
    """of a step, measured"""

    work: StepWork


@dataclass(frozen=True)
class Residual:
    what: str
    measured: float
    predicted: float

    @property
    def relative(self) -> float:
        return self.measured / self.predicted - 1


@dataclass(frozen=True)
class Calibration:
    constants: Constants
    residuals: list[Residual]
    memory: list[tuple[str, float, float]]
    """(run, peak GiB measured, GiB predicted)"""


def fit(observations: list[Observation], origin: str) -> tuple[Constants, list[Residual]]:
    """Constants that fit best, and what is left.

    Raises:
        InputError: times that no finite constants come near.
    """
    prior = guesses()
    inverse_prior = np.linalg.inv(prior.covariance)
    start = np.log([prior[name] for name in NAMES])
    at, unexplained = start.copy(), UNEXPLAINED
    covariance = prior.covariance
    kinds = sorted({o.kind for o in observations})
    member = np.array([[o.kind == kind for o in observations] for kind in kinds], float)
    mean = member / member.sum(1, keepdims=True)  # over the observations of each kind
    for _ in range(_ROUNDS):
        constants = _constants(at, covariance, unexplained, origin)
        slopes = np.array([log_slopes(_seconds(o.work), constants) for o in observations])
        errors = np.log([o.seconds / step_time(o.work, constants).seconds for o in observations])
        own = _OWN_ERROR**2 * np.eye(len(observations))
        weight = np.linalg.inv(unexplained**2 * member.T @ member + own)
        # Gauss-Newton: each round solves the problem made linear at the last one's answer.
        covariance = np.linalg.inv(slopes.T @ weight @ slopes + inverse_prior)
        step = covariance @ (slopes.T @ weight @ errors - inverse_prior @ (at - start))
        at, left = at + step, mean @ (errors - slopes @ step)
        between = mean @ slopes
        told = (
            np.trace(between @ covariance @ between.T) / unexplained**2
        )  # constants that runs tell
        freedom = len(kinds) - told
        least = _LEAST_UNEXPLAINED if freedom >= _SEVERAL else UNEXPLAINED
        found = float(np.sqrt(left @ left / freedom)) if freedom >= 1 else 0.0
        unexplained = max(least, found)
    constants = _constants(at, covariance, unexplained, origin)
    if not constants.finite:
        raise InputError(
            f"the constants {origin} are not finite: the measured times are far from any that these runs "
            f"can have; look at seconds_per_step"
        )
    residuals = [
        Residual(o.what, o.seconds, step_time(o.work, constants).seconds) for o in observations
    ]
    return constants, residuals


def _seconds(work: StepWork) -> Callable[[Constants], float]:
    return lambda constants: step_time(work, constants).seconds


def _constants(
    logs: np.ndarray, covariance: np.ndarray, unexplained: float, origin: str
) -> Constants:
    values = dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
    return Constants(values, covariance, unexplained, origin)


def calibrate(path: Path) -> dict[str, Calibration]:
    """Calibrations by the name of the device.

    Raises:
        InputError: a file without runs, or a run that cannot be predicted.
    """
    by_device: dict[str, list[MeasuredRun]] = {}
    for run in read_runs(path):
        by_device.setdefault(run.device.name, []).append(run)
    return {name: _calibration(runs) for name, runs in by_device.items()}


def _calibration(runs: list[MeasuredRun]) -> Calibration:
    observations, memory = [], []
    for run in runs:
        own, need = _observations(run)
        observations += own
        if run.peak_memory_gib is not None:
            memory.append((run.what, run.peak_memory_gib, need / 2**30))
    kinds = len({o.kind for o in observations})
    origin = f"fitted to {len(observations)} measured steps of {kinds} kinds of runs"
    constants, residuals = fit(observations, origin)
    return Calibration(constants, residuals, memory)


def _observations(run: MeasuredRun) -> tuple[list[Observation], int]:
    """(observations, most bytes predicted)."""
    config, gpus = run.config, run.gpus
    cluster = cluster_of(run.device, gpus, run.gpus_per_node)
    layout = layout_of(config, gpus)
    forecaster = Forecaster(config, cluster, guesses(), shorter=True)
    config = upstream_view(config, run_folder_path(config), gpus)
    kind = (
        f"{config.model.flavor}, {layout.replicas} x {layout.shards}, "
        f"{checkpointing_name(config.activation_checkpoint)}, compiled: {blocks_compiled(config)}"
    )
    found, most = [], 0
    for shape in run.shapes:
        arguments = config, layout, shape.lengths, shape.samples
        work = forecaster.work(*arguments, shape.accumulation)
        words = f"{run.what}: {shape.samples} x {shape.lengths.frames} frames"
        found.append(Observation(words, kind, shape.seconds, work))
        most = max(most, forecaster.memory(*arguments).total)
    return found, most

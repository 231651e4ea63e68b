"""`--calibrate results.json`: fits the constants of the time to measured runs, by least squares.

The file holds one measured run, a list of them, or {"runs": [...]}. A run is what benchmark mode writes
(benchmark.json); of it these keys are read:

    config          the resolved config, section by section
    gpus            number of ranks
    environment     {"device": name as the driver reports it}; or "gpu": a name of `--gpu`
    gpus_per_node   optional; all in one node up to 8, else 8
    peak_memory_gib optional; compared with the prediction, fits nothing
    shapes          list of {samples, frames, text_tokens, speaker_frames, steps, micro_batches,
                    seconds_per_step}: padded sizes of a micro-batch, how many steps and micro-batches
                    had them, and seconds of a step, a number or {"median": ...}

Each shape of each run is an observation. The logarithms of the constants are found that make the sum of

    ((log measured - log predicted) / unexplained)² + ((log constant - log guess) / its deviation)²

least, so that constants which the runs do not tell keep their guesses; `unexplained` is then set to
what the residuals show, and both are repeated.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.config import config_from_dict, run_folder_path, upstream_view
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.planning.constants import NAMES, UNEXPLAINED, Constants, guesses
from torchtitan.models.dit_tts.planning.devices import (
    Device,
    cluster_of,
    device_of,
    find_device,
)
from torchtitan.models.dit_tts.planning.forecast import Forecaster, layout_of
from torchtitan.models.dit_tts.planning.step_time import StepWork, log_slopes, step_time

_LEAST_UNEXPLAINED = 0.002
_ROUNDS = 20


@dataclass(frozen=True)
class Observation:
    """A shape of a measured run."""

    what: str
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
    """Constants that fit best, and what is left."""
    prior = guesses()
    inverse_prior = np.linalg.inv(prior.covariance)
    start = np.log([prior[name] for name in NAMES])
    at, unexplained = start.copy(), UNEXPLAINED
    covariance = prior.covariance
    for _ in range(_ROUNDS):
        constants = _constants(at, covariance, unexplained, origin)
        slopes = np.array([log_slopes(_seconds(o.work), constants) for o in observations])
        errors = np.log(
            [o.seconds / step_time(o.work, constants).seconds for o in observations]
        )
        # Gauss-Newton: each round solves the problem made linear at the last one's answer.
        covariance = np.linalg.inv(slopes.T @ slopes / unexplained**2 + inverse_prior)
        at = at + covariance @ (slopes.T @ errors / unexplained**2 - inverse_prior @ (at - start))
        left = errors - slopes @ (covariance @ (slopes.T @ errors / unexplained**2))
        told = np.trace(slopes @ covariance @ slopes.T) / unexplained**2  # constants that runs tell
        freedom = len(observations) - told
        if freedom >= 1:
            unexplained = max(_LEAST_UNEXPLAINED, float(np.sqrt(left @ left / freedom)))
    constants = _constants(at, covariance, unexplained, origin)
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
    runs = _read_runs(path)
    by_device: dict[str, list[tuple[str, dict[str, Any], Device]]] = {}
    for number, run in enumerate(runs, 1):
        what = f"{path}, run {number}"
        device = _device(run, what)
        by_device.setdefault(device.name, []).append((what, run, device))
    return {name: _calibration(group) for name, group in by_device.items()}


def _calibration(group: list[tuple[str, dict[str, Any], Device]]) -> Calibration:
    observations, memory = [], []
    for what, run, device in group:
        try:
            own, need = _observations(what, run, device)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{what}: {error} is missing or is not as benchmark mode writes it; give a run's "
                f"benchmark.json"
            ) from error
        observations += own
        if run.get("peak_memory_gib"):
            memory.append((what, float(run["peak_memory_gib"]), need / 2**30))
    constants, residuals = fit(observations, f"fitted to {len(observations)} measured steps")
    return Calibration(constants, residuals, memory)


def _observations(
    what: str, run: dict[str, Any], device: Device
) -> tuple[list[Observation], int]:
    """(observations, most bytes predicted)."""
    config = config_from_dict(run["config"], what)
    gpus = int(run["gpus"])
    cluster = cluster_of(device, gpus, int(run.get("gpus_per_node") or min(gpus, 8)))
    layout = layout_of(config, gpus)
    forecaster = Forecaster(config, cluster, guesses(), shorter=True)
    config = upstream_view(config, run_folder_path(config), gpus)
    found, most = [], 0
    for shape in run["shapes"]:
        lengths = Lengths(shape["frames"], shape["text_tokens"], shape["speaker_frames"])
        seconds = shape["seconds_per_step"]
        seconds = float(seconds["median"] if isinstance(seconds, dict) else seconds)
        accumulation = round(shape["micro_batches"] / shape["steps"])
        arguments = config, layout, lengths, int(shape["samples"]), accumulation
        words = f"{what}: {shape['samples']} x {lengths.frames} frames"
        found.append(Observation(words, seconds, forecaster.work(*arguments)))
        most = max(most, forecaster.memory(*arguments[:-1]).total)
    return found, most


def _read_runs(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"--calibrate {path} cannot be read ({error}); give a benchmark.json, or a list of them"
        ) from error
    if isinstance(content, dict):
        content = content.get("runs", [content])
    runs = [run for run in content if isinstance(run, dict) and run.get("shapes")]
    if not runs:
        raise InputError(
            f"--calibrate {path} holds no run with shapes; give a benchmark.json, or a list of them"
        )
    return runs


def _device(run: dict[str, Any], what: str) -> Device:
    if "gpu" in run:
        return find_device(run["gpu"])
    reported = str((run.get("environment") or {}).get("device"))
    device = device_of(reported)
    if device is None:
        raise InputError(
            f"{what} was measured on {reported!r}, a device that plans do not know; leave it out"
        )
    return device
